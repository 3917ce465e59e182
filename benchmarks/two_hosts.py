"""Training steps that really compute, on two hosts with a slow link, against DDP. Needs root, and Linux.

    python benchmarks/two_hosts.py [ROUNDS]

The hosts are network namespaces of this machine (`tests/lab/hosts.py`), with a rank of one thread each. Models and
turns are those of `renkei bench step`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import renkei
from four_hosts import finish
from record import ROOT, Record, table
from renkei.bench.comparison import ALONE
from renkei.bench.default_group import default_group
from renkei.bench.step import DDP_BUCKETS_MIB, MODELS, STEPS_IN_A_ROW, alone, measure, with_ddp, with_renkei

sys.path.append(str(ROOT / "tests"))
from lab.hosts import Hosts

HOSTS = 2
LINKS = ("200mbit", "1gbit")
WIRES = ("fp32", "bf16", "int8")
PORT = "23456"
LONGEST = 1500.0  # seconds


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        measure_as_rank(rounds=int(sys.argv[2]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    record = Record("two-hosts")
    rows = []
    for link in LINKS:
        for result in run_ranks(link, rounds):
            record.add(link=link, **result)
            exposed = f"{result['exposed_ms']:.0f}"
            took = f"{result['median_ms']:.0f} ({result['quartiles_ms'][0]:.0f} to {result['quartiles_ms'][1]:.0f})"
            rows.append((link, result["model"], result["name"], took, exposed, f"{result['ratio']:.2f}"))
    print(record.write("Steps that compute, on two hosts", describe(rounds, rows)))


def describe(rounds: int, rows: list[tuple[str, ...]]) -> str:
    heads = ("link", "model", "who", "step, ms (quartiles)", "exposed, ms", "times as long as the best DDP")
    sizes = {name: sum(each.numel() for each in make()[0].parameters()) for name, make in MODELS.items()}
    models = ", ".join(f"{name} {4 * numel / 1e6:.1f}" for name, numel in sizes.items())
    return (
        f"{HOSTS} hosts, network namespaces of this machine, one rank of one thread each, links of 200 Mbit/s and 1 "
        "Gbit/s in each direction (`tc tbf`). The models of `renkei bench step`, really computed; gradients in MB: "
        f"{models}. {rounds} rounds of {STEPS_IN_A_ROW} steps per contestant, in random order; a step takes as long as "
        "on the slowest rank. *Exposed* is what a step takes longer than one without communication in the same round. "
        "Ratios are to the quickest DDP, with or without torch's fp16 hook, in the same round.\n\n" + table(heads, rows)
    )


def run_ranks(link: str, rounds: int) -> list[dict[str, Any]]:
    with Hosts(HOSTS) as hosts:
        for host in range(HOSTS):
            hosts.shape(host, link)
        meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, "WORLD_SIZE": str(HOSTS)}
        command = [sys.executable, str(Path(__file__).resolve()), "rank", str(rounds)]
        ranks = [hosts.start(rank, *command, RANK=str(rank), OMP_NUM_THREADS="1", **meeting) for rank in range(HOSTS)]
        deadline = time.monotonic() + LONGEST
        said = [finish(rank, deadline) for rank in ranks]
        return json.loads(said[0].splitlines()[-1])


def measure_as_rank(rounds: int) -> None:
    """Rank 0 prints the results."""
    torch.set_num_threads(1)
    results = []
    with renkei.create_communicator("flat/gloo", timeout=120) as comm, default_group(comm):
        for name, model in MODELS.items():
            contestants = {ALONE: alone(comm, model)}
            for mebibytes in DDP_BUCKETS_MIB:
                contestants[f"ddp, {mebibytes} MiB buckets"] = with_ddp(comm, model, mebibytes)
                contestants[f"ddp-fp16, {mebibytes} MiB buckets"] = with_ddp(comm, model, mebibytes, in_fp16=True)
            for wire in WIRES:
                contestants[f"renkei, {wire}"] = with_renkei(comm, model, wire=wire)
                late = with_renkei(comm, model, wire=wire, double_buffering=True)
                contestants[f"renkei, {wire}, double buffering"] = late
            results += measure(comm, name, contestants, rounds)
        if comm.rank == 0:
            print(json.dumps([asdict(result) for result in results]), flush=True)


if __name__ == "__main__":
    main()
