"""Weak and strong scaling over up to 16 emulated ranks, of DDP and of each communicator. Needs root, and Linux.

    python benchmarks/scaling.py [ROUNDS]

Hosts are network namespaces of this machine (`tests/lab/hosts.py`) with four ranks each, as the GPUs of a host; what
ranks compute is emulated (`emulated.py`). In each round all contestants take their turn, in random order.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import renkei
from emulated import BUSY, Contestant, Model, take_turn, with_ddp, with_renkei
from four_hosts import finish
from record import ROOT, Record, table
from renkei.communicators.communicator import Communicator
from renkei.report.plots import COLOURS, MARKERS

sys.path.append(str(ROOT / "tests"))
from lab.hosts import Hosts

SIZES = (1, 2, 4, 8, 16)
RANKS_PER_HOST = 4
LINK = "100mbit"
LAYERS, NUMEL = 10, 100_000  # 4 MB in all
WEAK = 0.3  # seconds that a rank computes for a step, whatever the number of ranks
STRONG = 1.2  # seconds that one rank computes for a step; of n ranks, each an n-th
WARM_UP, STEPS = 2, 3
PORT = "23456"
LONGEST = 1200.0  # seconds for all turns on so many ranks
CORES = len(os.sched_getaffinity(0))
IDEAL = "ideal"
DDP_MB = (1, 25)
WITHIN = "shared_memory+gloo"
COMMUNICATORS = ("naive/gloo", "flat/gloo", f"hierarchical/{WITHIN}", f"two_dimensional/{WITHIN}")
LATE = {
    f"hierarchical/{WITHIN}, bf16, double buffering": {"wire": "bf16"},
    f"hierarchical/{WITHIN}, int8, double buffering": {"wire": "int8"},
}


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        measure_as_rank(rounds=int(sys.argv[2]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    record = Record("scaling")
    turns: list[dict[str, Any]] = []
    for size in SIZES:
        for turn in run_ranks(size, rounds):
            turns.append(turn)
            record.add(**turn)
    rates = {scaling: summarize(turns, scaling) for scaling in ("weak", "strong")}
    folder = record.write("Scaling", describe(rounds, rates))
    draw(rates, folder / "scaling.png")
    print(folder)


def run_ranks(size: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What rank 0 says, turn by turn."""
    num_hosts = -(-size // RANKS_PER_HOST)
    with Hosts(num_hosts) as hosts:
        for host in range(num_hosts):
            hosts.shape(host, LINK)
        meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, "WORLD_SIZE": str(size)}
        command = [sys.executable, str(Path(__file__).resolve()), "rank", str(rounds)]
        ranks = [
            hosts.start(rank // RANKS_PER_HOST, *command, RANK=str(rank), OMP_NUM_THREADS="1", **meeting)
            for rank in range(size)
        ]
        deadline = time.monotonic() + LONGEST
        for line in ranks[0].stdout or ():
            yield json.loads(line)
        for rank in ranks:
            finish(rank, deadline)


Rates = dict[str, dict[int, float | None]]  # by contestant and number of ranks, how many times as much as one rank


def summarize(turns: Sequence[dict[str, Any]], scaling: str) -> Rates:
    """The median of turns; None where ranks were too busy in more than half of them."""
    took: dict[str, dict[int, list[float]]] = {}
    for turn in turns:
        if turn["scaling"] == scaling:
            own = took.setdefault(turn["name"], {}).setdefault(turn["size"], [])
            own.append(turn["seconds"] if max(turn["busiest"], turn["machine"]) < BUSY else float("inf"))
    alone = STRONG if scaling == "strong" else WEAK
    rates: Rates = {IDEAL: dict(zip(SIZES, map(float, SIZES), strict=True))}
    for name in sorted(took):
        rates[name] = {}
        for size, seconds in took[name].items():
            rate = alone / statistics.median(seconds) * (size if scaling == "weak" else 1)
            rates[name][size] = rate or None
    return rates


def describe(rounds: int, rates: dict[str, Rates]) -> str:
    texts = [
        f"1 to 16 ranks of one thread each; {RANKS_PER_HOST} a host, which is a network namespace of this machine with "
        f"a link of {LINK} in each direction (`tc tbf`); so one host up to 4 ranks, 2 hosts for 8, 4 for 16. {LAYERS} "
        f"emulated layers of {NUMEL:,} parameters ({4 * LAYERS * NUMEL / 1e6:g} MB), whose forward and backward passes "
        "**sleep**, a third and two thirds of the computation: so these are no times of a real model. *Weak scaling*: "
        f"each rank computes {1000 * WEAK:.0f} ms a step. *Strong scaling*: one rank computes {1000 * STRONG:.0f} ms, "
        f"n ranks an n-th of that each. {rounds} rounds (of one rank, which exchanges nothing, one) of "
        f"{STEPS} steps per contestant, in random order, after {WARM_UP} that aren't timed; a step takes as "
        "long as on the slowest rank; the median of turns. Turns count as endless in which a rank used more than "
        f"{BUSY:.0%} of a core, or all ranks together of the machine.\n\n"
        "How many times as many samples a second as the ideal of one rank, which only computes:"
    ]
    for scaling, by_name in rates.items():
        rows = [[name, *(show(by_size.get(size)) for size in SIZES)] for name, by_size in by_name.items()]
        texts.append(f"**{scaling} scaling**\n\n" + table(["ranks", *map(str, SIZES)], rows))
    return "\n\n".join([*texts, "![scaling](scaling.png)"])


def show(rate: float | None) -> str:
    return "too busy" if rate is None else f"{rate:.2f}"


def draw(rates: dict[str, Rates], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    figure.suptitle(f"Emulated computation (layers sleep), {RANKS_PER_HOST} ranks a host, links of {LINK}", fontsize=11)
    for axes, (scaling, by_name) in zip(figure.subplots(1, 2), rates.items(), strict=True):
        for at, (name, by_size) in enumerate(by_name.items()):
            there = {size: rate for size, rate in by_size.items() if rate is not None}
            axes.plot(list(there), list(there.values()), label=name, linewidth=1.6, markersize=6, **look_of(name, at))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks(SIZES)
        axes.set_xlabel("ranks")
        axes.set_ylabel("times the samples a second of one rank")
        axes.set_title(f"{scaling} scaling", fontsize=10)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def look_of(name: str, number: int) -> dict[str, Any]:
    if name == IDEAL:
        return {"color": "#666666", "linestyle": (0, (1, 1))}
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ":" if name.startswith("ddp") else "--" if name in LATE else "-",
    }


# -- on each rank -------------------------------------------------------------------------------------------------


def measure_as_rank(rounds: int) -> None:
    """Rank 0 prints a line for each turn: how long a step took on the slowest rank, and how busy ranks were."""
    comms = {spec: renkei.create_communicator(spec, timeout=120) for spec in COMMUNICATORS}
    flat = comms["flat/gloo"]
    model = Model(LAYERS, NUMEL)
    made = contestants(comms, model)
    for scaling, model.seconds in (("weak", WEAK), ("strong", STRONG / flat.size)):
        for contestant in made.values():  # bucket plans are made in the first steps
            for _ in range(3):
                contestant.step()
            contestant.flush()
        for number in range(rounds if flat.size > 1 else 1):  # where nothing is exchanged, all do the same
            for name in random.Random(number).sample(list(made), len(made)):
                seconds, busy = take_turn(flat, made[name], WARM_UP, STEPS)
                slowest, busiest = flat.all_reduce(torch.tensor([seconds, busy], dtype=torch.float64), "max").tolist()
                machine = flat.all_reduce(torch.tensor(busy, dtype=torch.float64)).item() / CORES
                if flat.rank == 0:
                    turn = {"scaling": scaling, "size": flat.size, "round": number, "name": name}
                    turn |= {"seconds": round(slowest, 5), "busiest": round(busiest, 3), "machine": round(machine, 3)}
                    print(json.dumps(turn), flush=True)
    flat.barrier()
    for comm in comms.values():
        comm.close()


def contestants(comms: dict[str, Communicator], model: Model) -> dict[str, Contestant]:
    """All of them, by name."""
    made = {f"ddp, {mb} MB buckets": with_ddp(comms["flat/gloo"].duplicate(), model, mb) for mb in DDP_MB}
    made |= {spec: with_renkei(comm, model) for spec, comm in comms.items()}
    comm = comms[f"hierarchical/{WITHIN}"]
    return made | {name: with_renkei(comm, model, double_buffering=True, **how) for name, how in LATE.items()}


if __name__ == "__main__":
    main()
