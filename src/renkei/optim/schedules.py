"""Learning rates as pure functions of the fractional epoch.

Written in epochs, a schedule does not depend on batch size or number of ranks and can't be stepped too often.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float], float]


def constant(value: float) -> Schedule:
    """The same at all times."""
    return lambda epoch: value


def cosine(peak: float, epochs: float, end: float = 0.0) -> Schedule:
    """From `peak` to `end` along half a cosine over `epochs` (Loshchilov and Hutter 2017, eq. 5, without restarts)."""

    def rate(epoch: float) -> float:
        progress = min(1.0, max(0.0, epoch / epochs))
        return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2

    return rate


def gradual_warmup(schedule: Schedule, epochs: float, start: float = 0.0) -> Schedule:
    """Rise linearly from `start` times to all of what `schedule` says, over the first `epochs` (Goyal et al. 2017).

    `schedule` runs from the beginning all the same.
    """

    def rate(epoch: float) -> float:
        if epoch >= epochs:
            return schedule(epoch)
        return schedule(epoch) * (start + (1 - start) * max(0.0, epoch) / epochs)

    return rate


def post_local(begin: int, every: int) -> Callable[[int], int]:
    """For `LocalUpdates`: rounds of one step up to step `begin`, then of `every` (post-local SGD, Lin et al. 2018)."""
    return lambda step: 1 if step < begin else every
