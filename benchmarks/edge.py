"""Training on hosts with slow, lossy links, of which one leaves and one joins, against synchronous steps. Needs root.

    python benchmarks/edge.py

The hosts are network namespaces of this machine (`tests/lab/hosts.py`); what they run is examples/edge/train.py.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch

import renkei
from record import ROOT, Record, table
from renkei.data.datasets import digits, split
from renkei.models.convnet import perceptron

sys.path += [str(ROOT / "tests"), str(ROOT / "examples" / "edge")]
from train import CLASSES, HELD_OUT, shard_of

from lab.hosts import Hosts

RATES = ("20mbit", "10mbit", "5mbit", "1mbit", "5mbit")  # of the hosts' links; the last host joins
LOSS = 0.02
ROUNDS, EVERY, BATCH, RATE, SKEW = 30, 10, 32, 0.05, 0.7
LEAVES_AFTER = 10  # rounds
LONGEST = 900.0  # seconds
PORT = "29400"
EXAMPLE = str(ROOT / "examples" / "edge" / "train.py")


def main() -> None:
    if sys.argv[1:2] == ["synchronous"]:
        train_synchronously(int(sys.argv[2]))
        return
    record = Record("edge")
    found = [
        ("synchronous, fp32, nobody comes or goes", run(synchronous)),
        ("local, int8, nobody comes or goes", run(lambda hosts: local(hosts, comes_and_goes=False))),
        ("local, int8, one leaves, one joins", run(lambda hosts: local(hosts, comes_and_goes=True))),
    ]
    for name, hosts in found:
        for number, host in enumerate(hosts):
            record.add(name=name, host=number, link=RATES[number], **host)
    print(record.write("Training at the edge", describe(found)))


def describe(found: list[tuple[str, list[dict[str, Any]]]]) -> str:
    rows = []
    for name, hosts in found:
        last = [host for host in hosts if host["steps"] == max(each["steps"] for each in hosts)]
        sent = " / ".join(f"{host['bytes'] / 1e6:.2f}" for host in hosts)
        rows.append((name, last[0]["steps"], f"{100 * last[0]['top1']:.1f}", f"{last[0]['seconds']:.0f}", sent))
    return (
        f"Hosts, network namespaces of this machine, with links of {', '.join(RATES[:-1])} (and {RATES[-1]} for who "
        f"joins) in each direction (`tc tbf`), on which {LOSS:.0%} of all packets are lost (`iptables`). The digits, "
        f"{SKEW:.0%} of them dealt to hosts by their label; a perceptron of 19,210 parameters; {BATCH} samples a host "
        f"and step. Local: {EVERY} steps a round, what was moved in 8 bits. Bytes are those of whole packets, of each "
        "host, in MB, with what members say to one another at their store. One run each.\n\n"
        + table(("how", "steps", "top-1, %", "seconds", "sent, MB, by host"), rows)
    )


def run(start: Any) -> list[dict[str, Any]]:
    """What each host says in the end, and what it has sent."""
    with Hosts(len(RATES)) as hosts:
        for host, rate in enumerate(RATES):
            hosts.shape(host, rate)
            hosts.lose(host, LOSS)
        processes: dict[int, Popen[str]] = start(hosts)
        began = time.monotonic()
        said = []
        for host, process in processes.items():
            output, problems = process.communicate(timeout=LONGEST - (time.monotonic() - began))
            if process.returncode != 0:
                sys.exit(problems)
            said.append({**json.loads(output.splitlines()[-1]), "bytes": hosts.bytes_sent(host)})
        return said


def local(hosts: Hosts, *, comes_and_goes: bool) -> dict[int, Popen[str]]:
    def host(number: int, shard: int, *more: str) -> Popen[str]:
        where = ("--store", f"{hosts.address(0)}:{PORT}", "--shard", str(shard))
        how = ("--rounds", str(ROUNDS), "--every", str(EVERY), "--batch", str(BATCH), "--rate", str(RATE))
        return hosts.start(number, sys.executable, EXAMPLE, *where, *how, *more, OMP_NUM_THREADS="1")

    leaves = ("--leave-after", str(LEAVES_AFTER)) if comes_and_goes else ()
    processes = {0: host(0, 0, "--hold"), 1: host(1, 1), 2: host(2, 2, *leaves), 3: host(3, 3)}
    if comes_and_goes:
        next(processes[0].stderr or iter(()))  # the others have begun
        processes[4] = host(4, 2)
    return processes


def synchronous(hosts: Hosts) -> dict[int, Popen[str]]:
    meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, "WORLD_SIZE": str(len(RATES) - 1)}
    command = (sys.executable, str(Path(__file__).resolve()), "synchronous")
    return {
        rank: hosts.start(rank, *command, str(rank), RANK=str(rank), OMP_NUM_THREADS="1", **meeting)
        for rank in range(len(RATES) - 1)
    }


def train_synchronously(shard: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = Namespace(shards=len(RATES) - 1, skew=SKEW)
    training_set, test_set = split(digits(), HELD_OUT)
    inputs, target = shard_of(training_set, shard, options.shards, options.skew)
    with renkei.create_communicator("flat/gloo", timeout=60) as comm:
        model = perceptron(64, 256, CLASSES)
        inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        optimizer = renkei.MultiNodeOptimizer(inner, comm, model=model)
        generator = torch.Generator().manual_seed(shard)
        began = time.monotonic()
        for _ in range(ROUNDS * EVERY):
            picked = torch.randint(len(target), (BATCH,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[picked]), target[picked]).backward()
            optimizer.step()
        seconds = time.monotonic() - began
        comm.barrier()
    with torch.no_grad():
        right = (model(test_set.images).argmax(dim=1) == test_set.labels).float().mean()
    print(json.dumps({"steps": ROUNDS * EVERY, "top1": round(float(right), 4), "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
