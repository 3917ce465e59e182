"""``renkei bench``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from renkei.cli.in_job import NumRanks, is_to_start, start_this_command
from renkei.cli.output import show
from renkei.errors import UsageError
from renkei.launch.environments import detect
from renkei.names import check_known
from renkei.strict_json import dumps

if TYPE_CHECKING:
    from renkei.bench.step import Measurement

# As in `renkei.bench.step`, which loads torch.
MODELS = ("perceptron", "convnet")
PEERS = ("ddp",)
_PLAIN_WIDTH = 200  # columns; a file has as many as are needed, and no line is to be broken

bench = typer.Typer(help="Measure against peers, in turns, each at its best.", no_args_is_help=True)


@bench.callback()
def options() -> None:
    """Measure against peers, in turns, each at its best."""


@bench.command()
def step(
    num_ranks: NumRanks = None,
    peers: Annotated[str, typer.Option(help="Whom to compare with, comma-separated.")] = ",".join(PEERS),
    models: Annotated[str, typer.Option(help="What to train, comma-separated.")] = ",".join(MODELS),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of 8 steps each.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Time a training step, and what communication adds to it."""
    chosen_peers, chosen_models = _names("peer", peers, PEERS), _names("model", models, MODELS)
    if not chosen_models:
        raise UsageError(f"--models names none; choose from {', '.join(MODELS)}")
    if is_to_start(num_ranks):
        assert num_ranks is not None
        start_this_command(num_ranks, [])
        return
    results = _measure(chosen_models, chosen_peers, rounds)
    if detect(os.environ).rank == 0:
        show(dumps({"results": [asdict(result) for result in results]}) if as_json else _table(results))


def _measure(models: list[str], peers: list[str], rounds: int) -> list[Measurement]:
    from renkei.bench.step import default_group, measure
    from renkei.communicators.factory import create_communicator
    from renkei.recipes.threads import set_threads

    set_threads()
    with create_communicator() as comm, default_group(comm) if peers else nullcontext():
        return [result for model in models for result in measure(comm, model, peers, rounds)]


def _names(kind: str, listing: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in listing.split(",") if name.strip()]
    for name in names:
        check_known(kind, name, known)
    return names


def _table(results: list[Measurement]) -> str:
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    heads = ("model", "who", "step, ms", "quartiles", "exposed, ms", "of best peer")
    table = Table(*heads, box=HEAVY_HEAD if console.is_terminal else None)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    for result in results:
        low, high = result.quartiles_ms
        ratio = "" if result.ratio is None else f"{result.ratio:.3f}"
        numbers = (f"{result.median_ms:.2f}", f"{low:.2f}-{high:.2f}", f"{result.exposed_ms:.2f}", ratio)
        table.add_row(result.model, result.name, *numbers)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
