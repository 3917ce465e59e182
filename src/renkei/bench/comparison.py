"""Comparing how long contestants took that were measured in turns. Arithmetic only.

A machine that others share is slower for minutes on end, so what is compared is what was measured in the same round.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

ALONE = "no communication"
ALL_REDUCE = "all-reduce alone"

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """What one contestant took.

    Attributes:
        name, model: who trained what.
        median_ms, quartiles_ms: of a step, which takes as long as it does on the slowest rank.
        exposed_ms: how much longer a step is than one without communication in the same round, the median of rounds;
            all of it for the all-reduce alone, which nothing hides.
        waiting_ms: for how long of a step ranks waited, in the mean, for the slowest to have its gradients; the median.
            None where that wasn't measured.
        ratio: of a step to the best peer's in the same round, the median of rounds; None without peers, and for what
            isn't a step.
    """

    name: str
    model: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    exposed_ms: float
    waiting_ms: float | None
    ratio: float | None


def compare(
    model: str,
    seconds: Mapping[str, Sequence[Sequence[float]]],
    waiting: Mapping[str, Sequence[Sequence[float]]],
    peers: Sequence[str],
) -> list[Measurement]:
    """One measurement for each contestant.

    Args:
        seconds: by contestant, `ALONE` among them, and by round: how long each step of its turn took.
        waiting: likewise, for how long of it ranks waited for the slowest; NaN or nothing where that wasn't measured.
        peers: those contestants of whom the best counts: the one that is quickest by the median of its rounds.
    """
    turns = {name: [statistics.median(steps) for steps in rounds] for name, rounds in seconds.items()}
    best_peer = quickest(peers, turns)
    results = []
    for name, own in turns.items():
        steps = [1000 * step for rounds in seconds[name] for step in rounds]
        low, _, high = statistics.quantiles(steps, n=4)
        hidden = turns[ALONE] if name != ALL_REDUCE else [0.0] * len(own)
        waits = [1000 * step for rounds in waiting.get(name, ()) for step in rounds]
        ratio = None
        if best_peer is not None and name != ALL_REDUCE:
            ratio = median_ratio(own, turns[best_peer])
        results.append(
            Measurement(
                name=name,
                model=model,
                median_ms=round(statistics.median(steps), 3),
                quartiles_ms=(round(low, 3), round(high, 3)),
                exposed_ms=round(1000 * statistics.median(a - b for a, b in zip(own, hidden, strict=True)), 3),
                waiting_ms=round(statistics.median(waits), 3) if waits and not math.isnan(waits[0]) else None,
                ratio=ratio,
            )
        )
    return results


def quickest(names: Iterable[str], turns: Mapping[str, Sequence[float]]) -> str | None:
    """Of these contestants the one that is quickest by the median of its rounds; None if there are none."""
    return min(names, key=lambda name: statistics.median(turns[name]), default=None)


def median_ratio(own: Sequence[float], other: Sequence[float], decimals: int = 4) -> float:
    """How many times longer the first took than the second in the same round, the median of rounds."""
    return round(statistics.median(mine / its for mine, its in zip(own, other, strict=True)), decimals)


def random_orders(contestants: Iterable[T], rounds: int) -> Iterator[list[T]]:
    """For each round, the order in which contestants take turns; the same on all ranks."""
    order, shuffle = list(contestants), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        yield list(order)
