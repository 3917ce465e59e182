"""``renkei bench``."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from renkei.cli.bench_all_reduce import all_reduce
from renkei.cli.comma_separated import split_known
from renkei.cli.in_job import NumRanks, is_to_start, start_this_command
from renkei.cli.output import show
from renkei.cli.tables import as_table
from renkei.errors import UsageError
from renkei.launch.environments import detect
from renkei.strict_json import dumps
from renkei.writable import check_writable

if TYPE_CHECKING:
    from renkei.bench.comparison import Measurement
    from renkei.bench.timeline import Event

# As in `renkei.bench.step`, which loads torch.
MODEL_NAMES = ("perceptron", "convnet")
PEERS = ("ddp", "ddp-fp16")

bench = typer.Typer(help="Measure against peers, in turns, each at its best.", no_args_is_help=True)
bench.command("all-reduce")(all_reduce)


@bench.callback()
def options() -> None:
    """Measure against peers, in turns, each at its best."""


@bench.command()
def step(
    num_ranks: NumRanks = None,
    peers: Annotated[str, typer.Option(help=f"Whom to compare with, comma-separated: {', '.join(PEERS)}.")] = "ddp",
    models: Annotated[str, typer.Option(help="What to train, comma-separated.")] = ",".join(MODEL_NAMES),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of 8 steps each.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a timeline of some steps into this file, for Perfetto or Chrome.")
    ] = None,
) -> None:
    """Time a training step, and what communication adds to it. Batches lie in memory: loading them takes no time."""
    chosen_peers, chosen_models = split_known("peer", peers, PEERS), split_known("model", models, MODEL_NAMES)
    if not chosen_models:
        raise UsageError(f"--models names none; choose from {', '.join(MODEL_NAMES)}")
    if trace is not None:
        check_writable("timeline", trace)
    if is_to_start(num_ranks):
        assert num_ranks is not None
        start_this_command(num_ranks, [])
        return
    timeline: list[Event] | None = None if trace is None else []
    results = _measure(chosen_models, chosen_peers, rounds, timeline)
    if detect(os.environ).rank == 0:
        if trace is not None and timeline is not None:
            from renkei.bench.timeline import write

            write(trace, timeline)
        show(dumps({"results": [asdict(result) for result in results]}) if as_json else _table(results))


def _measure(models: list[str], peers: list[str], rounds: int, timeline: list[Event] | None) -> list[Measurement]:
    from renkei.bench.default_group import default_group
    from renkei.bench.step import MODELS, contestants_for, measure
    from renkei.communicators.factory import create_communicator
    from renkei.recipes.threads import set_threads

    set_threads()
    with create_communicator() as comm, default_group(comm) if peers else nullcontext():
        measured = (
            measure(comm, model, dict(contestants_for(comm, MODELS[model], peers)), rounds, timeline)
            for model in models
        )
        return [result for results in measured for result in results]


def _table(results: list[Measurement]) -> str:
    heads = ("model", "who", "step, ms", "quartiles", "exposed, ms", "waiting for\nthe slowest", "of best peer")
    rows = []
    for result in results:
        low, high = result.quartiles_ms
        ratio = "" if result.ratio is None else f"{result.ratio:.3f}"
        waiting = "" if result.waiting_ms is None else f"{result.waiting_ms:.2f}"
        numbers = (f"{result.median_ms:.2f}", f"{low:.2f}-{high:.2f}", f"{result.exposed_ms:.2f}", waiting, ratio)
        rows.append((result.model, result.name, *numbers))
    return as_table(heads, rows)
