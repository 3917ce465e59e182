"""Training steps over four hosts with slow links, against DDP and against the ideal. Needs root, and Linux.

    python benchmarks/slow_network.py [ROUNDS]

The hosts are network namespaces of this machine (`tests/lab/hosts.py`). Layers are emulated: forward and backward of
each sleep for a fixed time, for everybody, so that four hosts fit on the machine's cores. In each round all contestants
take their turn, in random order.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import renkei
from emulated import BUSY, FORWARD, Contestant, Model, take_turn, with_ddp, with_renkei
from four_hosts import finish
from record import ROOT, Record, table
from renkei.communicators.communicator import Communicator
from renkei.gradients.compression.int8 import Int8Codec
from renkei.gradients.compression.sixteen_bits import Bf16Codec, Fp16Codec

sys.path.append(str(ROOT / "tests"))
from lab.hosts import Hosts

HOSTS = 4
LINK = "200mbit"
LAYERS = 10
NUMEL = 250_000  # of each layer: 10 MB in all
SLOWNESS = (1.9, 3.8)  # how many times as long as the computation an all-reduce of all gradients in fp32 takes
WARM_UP = 2  # steps before the clock starts, so that what is late is on its way then, as it is when the clock stops
STEPS = 8  # timed in a turn
PROBES = 5  # all-reduces that tell how long one takes
PORT = "23456"
PATIENCE = 60.0  # seconds for a rank to end after rank 0 has
ALONE = "no communication"

Turn = dict[str, Any]  # what is noted of one


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        measure_as_rank(rounds=int(sys.argv[2]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    record = Record("slow-network")
    turns: list[Turn] = []
    with Hosts(HOSTS) as hosts:
        for host in range(HOSTS):
            hosts.shape(host, LINK)
        meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, "WORLD_SIZE": str(HOSTS)}
        command = [sys.executable, str(Path(__file__).resolve()), "rank", str(rounds)]
        ranks = [hosts.start(rank, *command, RANK=str(rank), OMP_NUM_THREADS="1", **meeting) for rank in range(HOSTS)]
        for line in ranks[0].stdout or ():  # each turn, as it ends
            turns.append(json.loads(line))
            record.add(**turns[-1])
        deadline = time.monotonic() + PATIENCE
        for rank in ranks:
            finish(rank, deadline)
    print(record.write("Training over slow links", describe(rounds, list(summarize(turns)))))


def describe(rounds: int, rows: list[tuple[object, ...]]) -> str:
    heads = ("fp32 / compute", "who", "step, ms (shortest to longest)", "turns", "ideal, ms", "ideal / step", "speed")
    return (
        f"{HOSTS} hosts, network namespaces of this machine, one rank of one thread each, links of {LINK} in each "
        f"direction (`tc tbf`). {LAYERS} emulated layers of {NUMEL:,} parameters, whose forward and backward passes "
        "**sleep**, a third and two thirds of the computation: so these are no times of a real model. They sleep as "
        "long as makes a sum of all gradients in fp32, measured in the same run, take "
        f"{SLOWNESS[0]} or {SLOWNESS[1]} times as long as a step without communication. {rounds} rounds of {STEPS} "
        f"steps per contestant, in random order, after {WARM_UP} that aren't timed: as many "
        "exchanges as computations, also with double buffering, whose first and last step differ from the others; a "
        "step takes as long as on the slowest rank; turns in which a rank used more than "
        f"{BUSY:.0%} of a core don't count.\n\n"
        "*Ideal* is, for who steps with late gradients, the longer of a step without communication and a sum of that "
        "format alone, both measured in the same run; for others a third of that step, and then the longer of the rest "
        "and that sum. *Speed* is that of the best DDP in fp32 at that "
        "slowness times so much.\n\n" + table(heads, rows)
    )


def summarize(turns: list[Turn]) -> Iterator[tuple[object, ...]]:
    for slowness in SLOWNESS:
        seconds: dict[str, list[float]] = {}
        for turn in turns:
            if turn["slowness"] == slowness:
                seconds.setdefault(turn["name"], []).extend([turn["seconds"]] if turn["seconds"] is not None else [])
        all_reduce = {turn["name"]: turn["all_reduce"] for turn in turns}
        alone = statistics.median(seconds[ALONE])
        best = min(statistics.median(own) for name, own in seconds.items() if name.startswith("ddp, fp32") and own)
        for name, own in seconds.items():
            if not own:
                yield (slowness, name, "too busy", 0, "", "", "")
                continue
            median = statistics.median(own)
            spread = f"{1000 * median:.0f} ({1000 * min(own):.0f} to {1000 * max(own):.0f})"
            ideal = ideal_of(name, alone, all_reduce[name])
            quickest = f"{1000 * ideal:.0f}", f"{ideal / median:.2f}"
            yield (slowness, name, spread, len(own), *quickest, f"{best / median:.2f} x")


def ideal_of(name: str, alone: float, all_reduce: float) -> float:
    if "double" in name or name == ALONE:
        return max(alone, all_reduce)
    return alone * FORWARD + max(alone * (1 - FORWARD), all_reduce)


# -- on each rank -------------------------------------------------------------------------------------------------

BUCKETS_MB = (1, 4, 25)  # of DDP
WIRES = ("fp32", "bf16", "fp16", "int8")
CODECS = {"fp32": None, "bf16": Bf16Codec(), "fp16": Fp16Codec(), "int8": Int8Codec()}


def contestants(comm: Communicator, nobody: Communicator, model: Model) -> dict[str, Contestant]:
    made = {ALONE: with_renkei(nobody, model)}
    made |= {f"ddp, fp32, {mb} MB buckets": with_ddp(comm.duplicate(), model, mb) for mb in BUCKETS_MB}
    hook = default_hooks.fp16_compress_hook
    made |= {
        f"ddp, torch's fp16 hook, {mb} MB buckets": with_ddp(comm.duplicate(), model, mb, hook) for mb in BUCKETS_MB
    }
    made |= {f"renkei, {wire}": with_renkei(comm, model, wire=wire) for wire in WIRES}
    late = {"double_buffering": True}
    made |= {f"renkei, {wire}, double buffering": with_renkei(comm, model, wire=wire, **late) for wire in WIRES}
    for wire in ("bf16", "int8"):
        name = f"renkei, {wire}, double buffering, without looking ahead"
        made[name] = with_renkei(comm, model, wire=wire, look_ahead=False, **late)
    return made


def measure_as_rank(rounds: int) -> None:
    """Rank 0 prints a line for each turn: how long a step took on the slowest rank, and its all-reduce alone."""
    comm = renkei.create_communicator("flat/gloo", timeout=120)
    nobody = renkei.create_communicator("null/gloo", timeout=120)
    model = Model(LAYERS, NUMEL)
    all_reduce = {wire: time_all_reduce(comm, wire) for wire in WIRES}
    made = contestants(comm, nobody, model)
    for slowness in SLOWNESS:
        model.seconds = compute = all_reduce["fp32"] / slowness
        model.seconds -= overhead(comm, made[ALONE], compute)
        for contestant in made.values():  # bucket plans are made in the first steps
            for _ in range(3):
                contestant.step()
            contestant.flush()
        for number in range(rounds):
            for name in random.Random(number).sample(list(made), len(made)):
                took = torch.tensor(take_turn(comm, made[name], WARM_UP, STEPS), dtype=torch.float64)
                slowest, busiest = comm.all_reduce(took, "max").tolist()
                if comm.rank == 0:
                    turn = {"slowness": slowness, "round": number, "name": name, "asleep": model.seconds,
                            "all_reduce": 0.0 if name == ALONE else all_reduce[wire_of(name)],
                            "seconds": slowest if busiest < BUSY else None}  # fmt: skip
                    print(json.dumps(turn), flush=True)
    comm.barrier()
    comm.close()


def overhead(comm: Communicator, alone: Contestant, asleep: float) -> float:
    """How much longer than its layers sleep a step takes that exchanges nothing, on the slowest rank."""
    for _ in range(3):
        alone.step()
    took = statistics.median(take_turn(comm, alone, WARM_UP, STEPS)[0] for _ in range(PROBES))
    return float(comm.all_reduce(torch.tensor(took, dtype=torch.float64), "max")) - asleep


def wire_of(name: str) -> str:
    return next((wire for wire in WIRES if f", {wire}" in name), "fp16")  # torch's hook has it in another place


def time_all_reduce(comm: Communicator, wire: str) -> float:
    """Seconds that the sum of as many numbers takes with nothing else to do, on the slowest rank."""
    codec, buffer = CODECS[wire], torch.zeros(LAYERS * NUMEL)
    times = []
    for _ in range(1 + PROBES):
        comm.barrier()
        begin = time.perf_counter()
        if codec is None:
            comm.start_sum(buffer, [buffer]).wait()
        else:
            comm.start_coded_sum(buffer, codec, None).wait()
        times.append(time.perf_counter() - begin)
    return float(comm.all_reduce(torch.tensor(statistics.median(times[1:]), dtype=torch.float64), "max"))


if __name__ == "__main__":
    main()
