"""``renkei bench all-reduce``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from renkei.bench.sizes import parse_size, show_size
from renkei.cli.comma_separated import split, split_known
from renkei.cli.in_job import NumRanks, is_to_start, start_this_command
from renkei.cli.output import show
from renkei.cli.tables import as_table
from renkei.cli.turns_bar import turns_bar
from renkei.communicators.requested import AUTO, read_name
from renkei.errors import UsageError
from renkei.launch import mpi
from renkei.launch.environments import detect
from renkei.machine import available_memory, describe_machine
from renkei.strict_json import dumps

if TYPE_CHECKING:
    from renkei.bench.bandwidth import AllReduceTime
    from renkei.communicators.exchange_times import ExchangeTimes

# As in `renkei.bench.contestants`, which loads torch.
PEERS = ("gloo", "mpi4py", "mpi-shared")
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}  # and their bytes

_BUFFERS = 2  # of the size given, that a contestant needs at a time: one to add, one to work with
_PROBE_SECONDS = 8.0  # and some more to begin and to end
_SIZES = "16KiB,256KiB,1MiB,16MiB,64MiB"


@dataclass(frozen=True)
class _Request:
    """What is to be measured."""

    communicators: list[str]
    peers: list[str]
    sizes: list[int]
    dtypes: list[str]
    rounds: int
    shows_progress: bool

    @property
    def needs_mpi(self) -> bool:
        """Whether any contestant talks over MPI."""
        wanted = [read_name(spec) for spec in self.communicators]
        backends = {backend for each in wanted for backend in (each.backend, each.backend_within)}
        return "mpi" in backends or any(peer.startswith("mpi") for peer in self.peers)


def all_reduce(
    num_ranks: NumRanks = None,
    communicators: Annotated[
        str, typer.Option(help="Which, comma-separated, as algorithm or algorithm/backend.")
    ] = AUTO,
    sizes: Annotated[str, typer.Option(help="Of buffers, as 16KiB, 1MiB, 10MB or bytes; comma-separated.")] = _SIZES,
    dtypes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(DTYPES)}.")] = "float32",
    peers: Annotated[str, typer.Option(help=f"Whom to compare with, comma-separated: {', '.join(PEERS)}.")] = "gloo",
    rounds: Annotated[int, typer.Option(min=5, help="Turns of each contestant.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw them, into this file: .png, .svg or .pdf.")] = None,
    save: Annotated[
        bool,
        typer.Option("--save", help="Measure nothing but what suits these ranks, in 10 s, for all jobs to come."),
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--no-progress", help="Show it on standard error.", show_default="on a terminal"),
    ] = None,
) -> None:
    """Time the sum of a buffer over ranks, against peers and against what the host's memory can do."""
    request = _Request(
        communicators=split(communicators),
        peers=split_known("peer", peers, PEERS),
        sizes=list(dict.fromkeys(map(parse_size, split(sizes)))),
        dtypes=split_known("dtype", dtypes, tuple(DTYPES)),
        rounds=rounds,
        shows_progress=sys.stderr is not None and sys.stderr.isatty() if progress is None else progress,
    )
    environment = detect(os.environ)
    _check(request, num_ranks or environment.local_size or environment.size, plot)
    if is_to_start(num_ranks):
        assert num_ranks is not None
        _start(request, num_ranks)
        return
    if save:
        _save(as_json)
        return
    results = _measure(request)
    if environment.rank == 0:
        show(dumps({"results": [asdict(result) for result in results]}) if as_json else _table(results))
        if plot is not None:
            _draw(results, environment.size, plot)


def _save(as_json: bool) -> None:
    """Choose what suits these ranks, and write it where `create_communicator` looks."""
    from renkei.bench.probing import probe
    from renkei.communicators.factory import create_communicator, tuning_key
    from renkei.communicators.tuning import remember
    from renkei.recipes.threads import set_threads

    set_threads()
    with create_communicator("flat") as comm:
        found = probe(comm, _PROBE_SECONDS)
        if comm.rank != 0:
            return
        file = remember(tuning_key(comm.nodes, comm.device), found)
    if as_json:
        show(dumps({"file": str(file), **asdict(found)}))
        return
    rows = [(name, _show_ms(own)) for name, own in sorted(found.milliseconds.items(), key=lambda item: item[1])]
    show(as_table((f"adding {show_size(found.total_bytes)} of gradients", "ms"), rows))
    if found.exchanges is not None:
        show(_table_of_exchanges(found.exchanges))
    chunk = f", {show_size(found.chunk_bytes)} at a time" if found.chunk_bytes else ""
    show(f"chosen: {found.communicator}, {show_size(found.bucket_bytes)} buckets{chunk}; saved in {file}")


def _table_of_exchanges(times: ExchangeTimes) -> str:
    rows = [
        (f"{number:,}", wire, _show_ms(own[at]), _show_ms(times.processor_milliseconds[wire][at]))
        for at, number in enumerate(times.numbers)
        for wire, own in times.milliseconds.items()
    ]
    return as_table(("gradients\nexchanged", "wire", "ms", "of that a\nprocessor's"), rows)


def _check(request: _Request, num_ranks: int, plot: Path | None) -> None:
    """Raise `UsageError` for what can't be measured on so many ranks of this host, or drawn."""
    for spec in request.communicators:
        read_name(spec)
    if not request.communicators and not request.peers:
        raise UsageError("--communicators and --peers name none; name one, as in --communicators flat/gloo")
    for kind, chosen, example in (("sizes", request.sizes, "1MiB"), ("dtypes", request.dtypes, "float32")):
        if not chosen:
            raise UsageError(f"--{kind} names none; name one, as in --{kind} {example}")
    widest = max(request.dtypes, key=DTYPES.__getitem__)
    if min(request.sizes) < DTYPES[widest]:
        raise UsageError(
            f"a buffer of {show_size(min(request.sizes))} can't hold a {widest}; give at least {DTYPES[widest]} bytes"
        )
    num_contestants = len(request.communicators) + len(request.peers) + 1
    needed, there_are = _BUFFERS * num_contestants * num_ranks * max(request.sizes), available_memory()
    if needed > there_are:
        raise UsageError(
            f"buffers of {show_size(max(request.sizes))} for {num_contestants} contestants on {num_ranks} ranks take "
            f"{needed / 2**30:,.1f} GiB, but this host has {there_are / 2**30:,.1f} GiB left; give smaller --sizes"
        )
    if plot is not None:
        from renkei.report import plots

        plots.check(plot)


def _start(request: _Request, num_ranks: int) -> None:
    """Run this command on new ranks: started by mpiexec if any contestant needs that."""
    if not request.needs_mpi:
        start_this_command(num_ranks, [])
        return
    # ranks see no terminal, for mpiexec passes on what they write
    progress = "--progress" if request.shows_progress else "--no-progress"
    mpi.start([sys.executable, "-m", "renkei", *sys.argv[1:], progress], num_ranks)


def _measure(request: _Request) -> list[AllReduceTime]:
    from renkei.bench.all_reduce import measure, open_contestants
    from renkei.recipes.threads import set_threads

    set_threads()
    with open_contestants(request.communicators, request.peers) as (comm, everyone), _failing_ends_the_job():
        for each in everyone:
            skipped = [dtype for dtype in request.dtypes if dtype not in each.dtypes]
            if skipped and comm.rank == 0:
                print(f"renkei: {each.communicator} doesn't know {', '.join(skipped)}: left out", file=sys.stderr)
        cases = [(dtype, num_bytes) for dtype in request.dtypes for num_bytes in request.sizes]
        results = []
        num_turns = request.rounds * sum(dtype in each.dtypes for dtype, _ in cases for each in everyone)
        with turns_bar(num_turns, request.shows_progress and comm.rank == 0) as on_turn:
            for dtype, num_bytes in cases:
                results += measure(
                    comm, everyone, dtype=dtype, num_bytes=num_bytes, rounds=request.rounds, on_turn=on_turn
                )
        return results


@contextmanager
def _failing_ends_the_job() -> Iterator[None]:
    """Let an error end this rank at once where the launcher isn't ours: others may wait for it in MPI, for ever.

    What all ranks are told alike, they leave in order.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception:
        environment = detect(os.environ)
        if environment.is_distributed and environment.launcher != "renkei":
            sys.excepthook(*sys.exc_info())  # `renkei.failures.first_cause` tells, and calls MPI_Abort
        raise


def _draw(results: Sequence[AllReduceTime], num_ranks: int, path: Path) -> None:
    from renkei.report import plots

    by_dtype: dict[str, list[AllReduceTime]] = {}
    for result in results:
        by_dtype.setdefault(f"{num_ranks} ranks, {result.dtype}", []).append(result)
    plots.draw_all_reduce(by_dtype, path, subtitle=describe_machine())


def _table(results: Sequence[AllReduceTime]) -> str:
    heads = ("buffer", "who", "ms", "quartiles", "bus,\nGB/s", "of\nmemory", "of best\npeer")
    rows = []
    for result in results:
        low, high = map(_show_ms, result.quartiles_ms)
        bus = "" if result.bus_gb_per_s is None else f"{result.bus_gb_per_s:.3g}"
        ratio = "" if result.ratio is None else f"{result.ratio:.3f}"
        numbers = (_show_ms(result.median_ms), f"{low}-{high}", bus, f"{result.of_memory:.3g}", ratio)
        rows.append((f"{show_size(result.bytes)} {result.dtype}", result.name, *numbers))
    return as_table(heads, rows)


def _show_ms(milliseconds: float) -> str:
    """Three digits where that makes sense: 0.003, 0.123, 1.23, 12.3, 1234."""
    decimals = 2 - math.floor(math.log10(max(milliseconds, 0.1)))
    return f"{milliseconds:.{max(0, decimals)}f}"
