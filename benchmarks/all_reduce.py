"""The sum of a buffer over 2 and 4 ranks of this host: Renkei's communicators against peers and against memory.

    python benchmarks/all_reduce.py [RUNS]

Each run lets all take turns in random order; what is claimed are medians over runs of what was found within a run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from record import Record, table
from renkei.bench.bandwidth import AllReduceTime
from renkei.bench.sizes import show_size
from renkei.machine import describe_machine
from renkei.report.plots import draw_all_reduce

ROUNDS = 7


@dataclass(frozen=True)
class Measurement:
    """One command. MPI's peers are measured apart from torch's: under mpiexec, Gloo's times vary threefold."""

    ranks: int
    sizes: str
    communicators: str
    peers: str
    dtypes: str = "float32"

    @property
    def where(self) -> str:
        return f"{self.ranks} ranks{' under mpiexec' if 'mpi' in self.peers else ''}"

    def run(self) -> list[dict[str, Any]]:
        lists = {name: getattr(self, name) for name in ("communicators", "peers", "sizes", "dtypes")}
        options = [word for name, values in lists.items() for word in (f"--{name}", values)]
        command = [sys.executable, "-m", "renkei", "bench", "all-reduce", "-n", str(self.ranks)]
        command += ["--rounds", str(ROUNDS), *options, "--json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])["results"]


MEASUREMENTS = (
    Measurement(2, "16KiB,64KiB,256KiB,1MiB,4MiB,10MiB,25MiB,100MiB", "flat/gloo,flat/shared_memory", "gloo"),
    Measurement(2, "50MiB", "flat/gloo,flat/shared_memory", "gloo", "bfloat16,float16"),
    Measurement(2, "16KiB,64KiB,1MiB,10MiB,25MiB,100MiB", "flat/shared_memory,flat/mpi", "mpi4py,mpi-shared"),
    Measurement(4, "1MiB,25MiB,100MiB", "flat/gloo,flat/shared_memory", "gloo"),
)
PEERS = ("gloo", "mpi4py", "mpi-shared")

Runs = list[AllReduceTime]  # of one contestant, one for each run
Case = tuple[str, str, int]  # where, dtype, bytes


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    record = Record("all-reduce")
    found: dict[Case, dict[str, Runs]] = {}
    for run in range(runs):
        for measurement in MEASUREMENTS:
            where = measurement.where
            for result in measurement.run():
                record.add(run=run, where=where, **result)
                time = AllReduceTime(**result)
                found.setdefault((where, time.dtype, time.bytes), {}).setdefault(time.name, []).append(time)
    rows = [row for case, by_name in found.items() for row in summarize(case, by_name)]
    heads = ("where", "dtype", "buffer", "who", "ms", "bus, GB/s", "of memory", "of best peer")
    text = (
        f"{runs} runs on one host, in each {ROUNDS} turns per contestant in random order; a turn takes as long as on "
        "the slowest rank. Peers are torch's `all_reduce` over Gloo, MPI's "
        "`Allreduce` by mpi4py, and the sum in memory shared through MPI that is written by hand; the last two are "
        "left out where NumPy doesn't know the dtype. All sums were checked.\n\n"
        "*Bus* is 2(n-1)/n times the buffer by time. *Of memory* is how long it took each rank to copy as many bytes "
        "from one buffer to another while all others did, divided by the time of the sum in the same round. (It may be "
        "above 1: a copy also reads what it overwrites.) Ratios are to the peer that is quickest over all runs, taken "
        "round by round; of each run the median counts, and here is the median of runs (smallest to largest).\n\n"
        + table(heads, rows)
        + "\n\n![times by size of the buffer](all_reduce.png)"
    )
    folder = record.write("All-reduce", text)
    draw_all_reduce(panels(found), folder / "all_reduce.png", subtitle=f"{describe_machine()}; {runs} runs")
    print(folder)


def summarize(case: Case, by_name: dict[str, Runs]) -> list[tuple[object, ...]]:
    """A row for each contestant; within a run, ratios are to the best peer of that run, so their ratios are kept."""
    where, dtype, size = case
    best = min((name for name in by_name if name in PEERS), key=lambda name: middle(by_name[name], "ratio"))
    rows: list[tuple[object, ...]] = []
    for name, results in by_name.items():
        bus = to_best = ""
        if results[0].bus_gb_per_s is not None:
            bus = f"{middle(results, 'bus_gb_per_s'):.3g}"
            to_best = spread([own.ratio / its.ratio for own, its in zip(results, by_name[best], strict=True)])
        of_memory = spread([result.of_memory for result in results])
        median = f"{middle(results, 'median_ms'):.3f}"
        rows.append((where, dtype, show_size(size), name, median, bus, of_memory, to_best))
    return rows


def panels(found: dict[Case, dict[str, Runs]]) -> dict[str, list[AllReduceTime]]:
    """For each place what is drawn of 32-bit floats: of all runs the median times and quartiles."""
    drawn: dict[str, list[AllReduceTime]] = {}
    for (where, dtype, size), by_name in found.items():
        for runs in by_name.values() if dtype == "float32" else ():
            low, high = (statistics.median(run.quartiles_ms[end] for run in runs) for end in (0, 1))
            who, median = (runs[0].communicator, runs[0].backend), middle(runs, "median_ms")
            time = AllReduceTime(*who, dtype, size, median, (low, high), None, of_memory=1.0, ratio=None)
            drawn.setdefault(f"{where}, {dtype}", []).append(time)
    return drawn


def middle(runs: Runs, attribute: str) -> float:
    return statistics.median(getattr(run, attribute) for run in runs)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
