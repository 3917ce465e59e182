"""Training over the internet: hosts with slow, lossy links and samples of their own, that come and go.

On the host that all others reach (its process holds the store where they meet, so it ends last):

    python train.py --store ADDRESS:29400 --hold --shard 0

and on each other host, at any time, the first ones beside it:

    python train.py --store ADDRESS:29400 --shard 1

Each steps by itself 20 times, then all bring together what they have moved, in 8 bits. ``--leave-after 5`` takes part
in that many rounds. A host that is switched off is left out from the end of the round on; started again, it joins anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import renkei
from renkei.data.datasets import ImageDataset, digits, split
from renkei.models.convnet import perceptron

CLASSES = 10
HELD_OUT = 360  # to test with


def shard_of(dataset: ImageDataset, shard: int, num_shards: int, skew: float) -> tuple[Tensor, Tensor]:
    """This host's samples: of `skew` of all samples those of its own classes, of the rest every so-manieth."""
    own = dataset.labels * num_shards // CLASSES == shard
    is_sorted = torch.arange(len(dataset)) % 100 < 100 * skew
    dealt = torch.arange(len(dataset)) % num_shards == shard
    mine = torch.where(is_sorted, own, dealt)
    return dataset.images[mine], dataset.labels[mine]


def open_store(place: str, hold: bool) -> dist.TCPStore:
    """Where the hosts meet."""
    address, _, port = place.rpartition(":")
    return dist.TCPStore(address, int(port), is_master=hold, wait_for_workers=False, timeout=timedelta(seconds=300))


def train(
    options: argparse.Namespace, store: dist.Store
) -> tuple[torch.nn.Module, renkei.LocalUpdates, renkei.Members]:
    """Train with whoever is there; the model is the same on all hosts in the end."""
    training_set, _ = split(digits(), HELD_OUT)
    inputs, target = shard_of(training_set, options.shard, options.shards, options.skew)
    model = perceptron(64, 256, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
    members = renkei.join(store, founders=options.shards, deadline=options.deadline)
    local = renkei.LocalUpdates(optimizer, members, model=model, every=options.every, wire=options.wire)
    generator = torch.Generator().manual_seed(members.number)
    while local.rounds < options.rounds and not local.has_left:
        if local.rounds + 1 == options.leave_after:
            local.leave()
        picked = torch.randint(len(target), (options.batch,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[picked]), target[picked]).backward()
        optimizer.step()
        time.sleep(options.pause)
        if local.steps % options.every == 0:
            print(f"round {local.rounds} of {options.rounds}", file=sys.stderr, flush=True)
    return model, local, members


def wait_for_others(store: dist.Store, members: renkei.Members, hold: bool) -> None:
    """The host that holds the store ends when all have that were there in the last round."""
    store.set(f"done/{members.number}", "")
    if hold:
        store.wait([f"done/{number}" for number in members.present], timedelta(seconds=60))


def main() -> None:
    """Train, and say how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="ADDRESS:PORT")
    parser.add_argument("--hold", action="store_true", help="hold the store on this host")
    parser.add_argument("--shard", type=int, required=True, help="which samples this host has")
    parser.add_argument("--shards", type=int, default=4, help="how many hosts the training begins with")
    parser.add_argument("--skew", type=float, default=0.7, help="share of the samples that are dealt by their label")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=20, help="steps of a round")
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--wire", default="int8")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds for which a host is waited for")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to try this out on one host")
    parser.add_argument("--leave-after", type=int, help="rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = open_store(options.store, options.hold)
    began = time.monotonic()
    model, local, members = train(options, store)
    _, test_set = split(digits(), HELD_OUT)
    with torch.no_grad():
        right = (model(test_set.images).argmax(dim=1) == test_set.labels).float().mean()
    said = {"rounds": local.rounds, "steps": local.steps, "top1": round(float(right), 4)}
    said["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(said), flush=True)
    wait_for_others(store, members, options.hold)
    local.close()


if __name__ == "__main__":
    main()
