"""The all-reduce of the backend "mpi-renkei" against mpi4py's own, in turns within one run.

mpiexec -n 2 python benchmarks/mpi_backend.py
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import renkei.communicators.backends as backends
from record import Record, table
from renkei.communicators.backends.mpi.implementation import describe_mpi, load

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "10 MiB": 10 * 2**20, "100 MiB": 100 * 2**20}
TITLE = "All-reduce over MPI: ours and mpi4py's"
ROUNDS = 9
MILLISECONDS = 150  # that one of them takes in a round, about


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    """By name, how a tensor is replaced by its sum over ranks: checked once, and then of zeros, again and again."""
    mpi, group = load(), dist.distributed_c10d._get_default_group()
    world = mpi.COMM_WORLD.Dup()
    tensor = torch.zeros(numel)
    array = tensor.numpy()
    calls: dict[str, Callable[[], object]] = {
        "mpi4py": lambda: world.Allreduce(mpi.IN_PLACE, array),
        "renkei": lambda: group.allreduce([tensor]).wait(),
    }
    numbers = torch.arange(numel, dtype=torch.float32) % 1009
    for name, call in calls.items():
        torch.mul(numbers, world.rank + 1, out=tensor)
        call()
        if not torch.equal(tensor, numbers * (world.size * (world.size + 1) // 2)):
            raise AssertionError(f"{name} adds wrongly")
    tensor.zero_()
    return calls


def measure(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """By name, the milliseconds that a call took in each round, on the slowest rank."""
    comm = load().COMM_WORLD
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for call in calls.values():
        call()
    estimate = (time.perf_counter() - begin) / len(calls) * 1000
    repetitions = comm.bcast(max(2, min(1000, round(MILLISECONDS / estimate))))
    for round_ in range(ROUNDS):
        for name in list(calls)[:: 1 if round_ % 2 else -1]:
            calls[name]()
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(repetitions):
                calls[name]()
            took = (time.perf_counter() - begin) / repetitions * 1000
            times[name].append(comm.allreduce(took, load().MAX))
    return times


def main() -> None:
    torch.set_num_threads(1)
    backends.register()
    dist.init_process_group("mpi-renkei", init_method="renkei-mpi://")
    record = Record("mpi_backend") if dist.get_rank() == 0 else None
    size = dist.get_world_size()
    rows = []
    for name, num_bytes in SIZES.items():
        times = measure(contestants(num_bytes // 4))
        ratio = statistics.median(ours / theirs for ours, theirs in zip(times["renkei"], times["mpi4py"], strict=True))
        medians = {which: statistics.median(each) for which, each in times.items()}
        rows.append((name, f"{medians['mpi4py']:.3f} ms", f"{medians['renkei']:.3f} ms", f"{ratio:.2f}"))
        if record is not None:
            record.add(size=name, ratio=ratio, milliseconds=times)
    if record is not None:
        print(record.write(TITLE, text(rows, size), launcher=f"mpiexec -n {size} python "))
    dist.destroy_process_group()


def text(rows: list[Any], num_ranks: int) -> str:
    library = re.sub(r" \(.*?\)", "", describe_mpi())  # without its file
    setting = f"{num_ranks} ranks, started by mpiexec, one thread each, fp32 in place; {library}."
    them = "mpi4py: `Allreduce(MPI.IN_PLACE, array)`; renkei: `group.allreduce([tensor]).wait()`."
    how = "Medians over rounds in turns; the ratio is the median of the rounds'."
    return f"{setting}\n\n{them} {how}\n\n" + table(("size", "mpi4py", "renkei", "renkei / mpi4py"), rows)


if __name__ == "__main__":
    main()
