"""Where the time of training steps goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from renkei.communicators.communicator import Communicator

# What a step's time is made of.
DATA = "data"  # the loader had no batch yet
COMPUTING = "computing"  # all the rest
COMMUNICATION = "communication"  # exposed: all ranks had come to the exchange of gradients, and it went on
WAITING = "waiting"  # the slowest rank had not come to the exchange
PARTS = (DATA, COMPUTING, COMMUNICATION, WAITING)

T = TypeVar("T")


class Stopwatch:
    """Times the steps that are made with the batches of a loader, on this rank.

    On a GPU, a batch is awaited while the step before may still be computed; both count as data.

    Args:
        seconds_waited: tells how long this rank has waited for gradients so far.
        clock: tells the time in seconds.
    """

    def __init__(self, seconds_waited: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds_waited, self._clock = seconds_waited, clock
        self._begin = self._came = self._waited_before = 0.0
        self._steps: list[tuple[float, float, float]] = []

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches; a step begins when one is asked for."""
        iterator = iter(loader)
        while True:
            self._begin, self._waited_before = self._clock(), self._seconds_waited()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._came = self._clock()
            yield batch

    def end_step(self) -> None:
        """The step was made. What follows, until the next batch is asked for, is not part of one."""
        waited = self._seconds_waited() - self._waited_before
        self._steps.append((self._came - self._begin, self._clock() - self._came - waited, waited))

    def take(self) -> Tensor:
        """The steps since the last call, [step, 3] in seconds: for data, computing, waiting for gradients."""
        steps, self._steps = self._steps, []
        return torch.tensor(steps, dtype=torch.float64, device="cpu").reshape(-1, 3)


def divide(steps: Tensor, least_waited: Tensor) -> dict[str, list[float]]:
    """By part of `PARTS`, how long it took in each step on this rank, in milliseconds.

    A sum ends on all ranks together, at e; a rank that comes to it at a waits for e - a, and the last to come for
    e - max(a), which is the least. What a rank waits above that is max(a) - a: for the last to come. So hosts' clocks
    need not agree.

    Args:
        steps: as `Stopwatch.take` gives them.
        least_waited: [step], the least of all ranks' seconds of waiting for gradients.
    """
    data, computing, waited = (1000 * steps).T
    communication = 1000 * least_waited
    parts = dict(zip(PARTS, (data, computing, communication, waited - communication), strict=True))
    return {name: [round(each, 3) for each in part.tolist()] for name, part in parts.items()}


def shares(milliseconds: Tensor) -> dict[str, float]:
    """By part of `PARTS`, its share of all; zeros if there is nothing.

    Args:
        milliseconds: [part].
    """
    total = float(milliseconds.sum())
    return {name: each / total if total else 0.0 for name, each in zip(PARTS, milliseconds.tolist(), strict=True)}


def over_ranks(comm: Communicator, steps: Tensor) -> tuple[dict[str, list[float]], dict[str, float]]:
    """What `divide` says of this rank's steps, and `shares` of all ranks'. A collective operation."""
    parts = divide(steps, comm.all_reduce(steps[:, 2].contiguous(), "min"))
    mine = torch.tensor([sum(parts[name]) for name in PARTS], dtype=torch.float64, device="cpu")
    return parts, shares(comm.all_reduce(mine))
