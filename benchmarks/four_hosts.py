"""The sum of a buffer over four hosts with slow links, against what the links carry. Needs root, and Linux.

    python benchmarks/four_hosts.py [ROUNDS]

The hosts are network namespaces of this machine (`tests/lab/hosts.py`), so they share its cores, and have a rank each,
or two. In each round all communicators take their turn, in random order.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch

import renkei
from record import ROOT, Record, table
from renkei.communicators.communicator import Communicator

sys.path.append(str(ROOT / "tests"))
from lab.hosts import Hosts
from lab.link_rate import measure_rate

SPECS = (
    "flat/gloo",
    "hierarchical/shared_memory+gloo",
    "staged/shared_memory+gloo",
    "two_dimensional/shared_memory+gloo",
)
HOSTS = 4
# How many ranks a host has, and whether they are neighbours or one on each host in turn (Slurm's block and cyclic).
PLACEMENTS = ((1, "block"), (2, "block"), (2, "cyclic"))
LINK = "200mbit"
NUMEL = 2_500_000  # 10 MB in fp32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_UP = 2
PORT = "23456"
LONGEST = 1800.0  # seconds for all rounds

Contestant = tuple[str, str]  # communicator and dtype


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        measure_as_rank(rounds=int(sys.argv[2]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    record = Record("four-hosts")
    rows = []
    with Hosts(HOSTS) as hosts:
        for host in range(HOSTS):
            hosts.shape(host, LINK)
        for ranks_per_host, placement in PLACEMENTS:
            where = {"ranks_per_host": ranks_per_host, "placement": placement}
            rates = measure_links(hosts)
            results = run_ranks(hosts, ranks_per_host, placement, rounds)
            rates += measure_links(hosts)
            record.add(**where, link_bits_per_second=rates)
            for result in results:
                record.add(**where, **result)
                times = summarize(statistics.median(rates), **result)
                rows.append((f"{ranks_per_host}, {placement}" if ranks_per_host > 1 else "1", *times))
    print(record.write("Sums over four hosts", describe(rounds, rows)))


def describe(rounds: int, rows: Sequence[Sequence[object]]) -> str:
    heads = ("ranks a host", "communicator", "dtype", "ms (shortest to longest)", "links' bound, ms", "of the bound")
    return (
        f"{HOSTS} hosts, network namespaces of this machine on a bridge, each with a link of {LINK} in each direction "
        f"(`tc tbf`) and one or two ranks of one thread. `start_sum(...).wait()` on a buffer of {NUMEL:,} elements "
        f"from `allocate`, all communicators in turns, in random order: the median of {rounds} rounds, after "
        f"{WARM_UP} that don't count and whose sums are checked. A sum takes as long as on the slowest rank.\n\n"
        "*Block*: neighbouring ranks share a host, so that a ring crosses each link once; *cyclic*: they are on "
        "different hosts, so that each step of a ring does.\n\n"
        "*The links' bound* is the time for 2(n-1)/n times the buffer, n being the number of hosts, at the rate that a "
        "plain TCP connection reached from host to host: the median over all hosts, before and after the rounds. Each "
        "host must send as much, however many ranks it has. *Of the bound* is the bound divided by the time; what lets "
        "16-bit floats travel as 32 bits can't reach more than half.\n\n" + table(heads, rows)
    )


def summarize(rate: float, communicator: str, dtype: str, seconds: Sequence[float]) -> tuple[object, ...]:
    bound = 8 * NUMEL * DTYPES[dtype].itemsize * 2 * (HOSTS - 1) / HOSTS / rate
    median = statistics.median(seconds)
    spread = f"{1000 * median:.0f} ({1000 * min(seconds):.0f} to {1000 * max(seconds):.0f})"
    return communicator, dtype, spread, f"{1000 * bound:.0f}", f"{bound / median:.2f}"


def measure_links(hosts: Hosts) -> list[float]:
    """Bits per second from each host to the next."""
    num_bytes = NUMEL * DTYPES["float32"].itemsize
    return [round(measure_rate(hosts, host, (host + 1) % HOSTS, num_bytes)) for host in range(HOSTS)]


def run_ranks(hosts: Hosts, ranks_per_host: int, placement: str, rounds: int) -> list[dict[str, Any]]:
    """What rank 0 says of each contestant."""
    size = HOSTS * ranks_per_host
    meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, "WORLD_SIZE": str(size)}
    command = [sys.executable, str(Path(__file__).resolve()), "rank", str(rounds)]
    ranks = [
        hosts.start(
            rank % HOSTS if placement == "cyclic" else rank // ranks_per_host,
            *command,
            RANK=str(rank),
            OMP_NUM_THREADS="1",
            **meeting,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + LONGEST
    said = [finish(rank, deadline) for rank in ranks]
    return json.loads(said[0].splitlines()[-1])


def finish(rank: Popen[str], deadline: float) -> str:
    output, problems = rank.communicate(timeout=deadline - time.monotonic())
    if rank.returncode != 0:
        sys.exit(problems)
    return output


# -- on each rank -------------------------------------------------------------------------------------------------


def measure_as_rank(rounds: int) -> None:
    """Let all contestants take turns; rank 0 prints how long each took on the slowest rank."""
    comms = {spec: renkei.create_communicator(spec, timeout=60) for spec in SPECS}
    arranging = comms[SPECS[0]]
    contestants: list[Contestant] = [(spec, dtype) for spec in SPECS for dtype in DTYPES]
    buffers = {each: comms[each[0]].allocate(NUMEL, DTYPES[each[1]], arranging.device) for each in contestants}
    for spec, dtype in contestants:
        for _ in range(WARM_UP):
            check_sum(comms[spec], buffers[spec, dtype])
    seconds: dict[Contestant, list[float]] = {each: [] for each in contestants}
    for number in range(rounds):
        for spec, dtype in random.Random(number).sample(contestants, len(contestants)):
            arranging.barrier()
            seconds[spec, dtype].append(time_sum(comms[spec], buffers[spec, dtype]))
    slowest = {
        each: arranging.all_reduce(torch.tensor(own, dtype=torch.float64), "max") for each, own in seconds.items()
    }
    if arranging.rank == 0:
        results = [
            {"communicator": spec, "dtype": dtype, "seconds": all_rounds.tolist()}
            for (spec, dtype), all_rounds in slowest.items()
        ]
        print(json.dumps(results), flush=True)
    arranging.barrier()
    for comm in comms.values():
        comm.close()


def check_sum(comm: Communicator, buffer: torch.Tensor) -> None:
    """Leaves zeros, which stay what they are however often they are added."""
    numbers = (torch.arange(buffer.numel()) % 7).to(buffer.dtype)
    torch.mul(numbers, comm.rank + 1, out=buffer)
    comm.start_sum(buffer, [buffer]).wait()
    if not torch.equal(buffer, numbers * (comm.size * (comm.size + 1) // 2)):
        raise AssertionError(f"{comm!r} adds wrongly")
    buffer.zero_()


def time_sum(comm: Communicator, buffer: torch.Tensor) -> float:
    begin = time.perf_counter()
    comm.start_sum(buffer, [buffer]).wait()
    return round(time.perf_counter() - begin, 5)


if __name__ == "__main__":
    main()
