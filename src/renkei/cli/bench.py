"""``renkei bench``."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from renkei.cli.in_job import is_to_start, start_this_command
from renkei.errors import UsageError
from renkei.launch.environments import detect
from renkei.names import check_known
from renkei.strict_json import dumps

if TYPE_CHECKING:
    from renkei.bench.step import Measurement

_PLAIN_WIDTH = 200  # columns; a file has as many as are needed, and no line is to be broken

bench = typer.Typer(help="Measure against peers, in turns, each at its best.", no_args_is_help=True)


@bench.callback()
def options() -> None:
    """Measure against peers, in turns, each at its best."""


@bench.command()
def step(
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="Start this many ranks here.", show_default="1")
    ] = None,
    peers: Annotated[str, typer.Option(help="Whom to compare with, comma-separated: ddp.")] = "ddp",
    models: Annotated[str, typer.Option(help="What to train, comma-separated.")] = "perceptron,convnet",
    rounds: Annotated[int, typer.Option(help="Turns of 8 steps each.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Time a training step, and what communication adds to it."""
    chosen_peers, chosen_models = _names(peers), _names(models)
    for peer in chosen_peers:
        check_known("peer", peer, ["ddp"])
    for model in chosen_models:
        check_known("model", model, ["perceptron", "convnet"])
    if not chosen_models:
        raise UsageError("--models names none; choose from perceptron, convnet")
    if rounds < 1:
        raise UsageError(f"--rounds {rounds}: must be at least 1")
    if is_to_start(num_ranks):
        assert num_ranks is not None
        start_this_command(num_ranks, [])
        return
    import torch

    from renkei.bench.step import measure, open_default_group
    from renkei.communicators.factory import create_communicator
    from renkei.launch.local import threads_per_rank

    with create_communicator() as comm:
        torch.set_num_threads(threads_per_rank(comm.intra_size))
        if chosen_peers:
            open_default_group(comm)
        results = [result for model in chosen_models for result in measure(comm, model, chosen_peers, rounds)]
        if chosen_peers:
            torch.distributed.destroy_process_group()
    if detect(os.environ).rank == 0:
        if as_json:
            print(dumps({"results": [asdict(result) for result in results]}))
        else:
            _print_table(results)


def _names(listing: str) -> list[str]:
    return [name.strip() for name in listing.split(",") if name.strip()]


def _print_table(results: list[Measurement]) -> None:
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
    console.print(table)
