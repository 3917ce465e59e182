"""What an all-reduce took, and how that compares to what the host's memory could do. Arithmetic only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from renkei.bench.comparison import median_ratio, quickest

# The contestant that adds nothing: every rank copies as many bytes, for each must be read and written at least once.
COPY = "copy"
FILLING = 2.0**-10  # what buffers are filled with before each turn
_TURN_BYTES = 2**23  # that a turn adds at least, up to this many times:
_MOST_IN_A_ROW = 32


@dataclass(frozen=True)
class AllReduceTime:
    """What one contestant took to replace a buffer by its sum over ranks.

    Attributes:
        communicator: the algorithm; or the peer's name, or `COPY`.
        backend: what a communicator's messages go over; None for the others.
        dtype, bytes: of the buffer on each rank.
        median_ms, quartiles_ms: of rounds, each of which takes as long as it does on the slowest rank.
        bus_gb_per_s: 2(n-1)/n times the buffer in each such time, in 10⁹ bytes: what each rank sends, and receives, in
            the algorithm that sends least, so that numbers of ranks can be compared. None for `COPY`.
        of_memory: how long it took every rank to copy as many bytes at the same time, divided by what this took in the
            same round; the median of rounds.
        ratio: of the time to the best peer's in the same round, the median of rounds; None without peers, and for
            `COPY`.
    """

    communicator: str
    backend: str | None
    dtype: str
    bytes: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    bus_gb_per_s: float | None
    of_memory: float
    ratio: float | None

    @property
    def name(self) -> str:
        """Who it was."""
        return self.communicator if self.backend is None else f"{self.communicator}/{self.backend}"


def bus_bandwidth(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bytes each rank must at least send for the sum of a buffer of `num_bytes`, by time; in GB/s.

    After NCCL's tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def sums_in_a_row(num_bytes: int, num_ranks: int, largest: float) -> int:
    """How many sums a contestant takes in a turn: several of small buffers, for which a clock is coarse.

    Each is added to the one before, which multiplies it by the number of ranks; the last, and one more, must stay below
    `largest`, the dtype's largest number.
    """
    enough = min(_MOST_IN_A_ROW, max(1, _TURN_BYTES // num_bytes))
    if num_ranks == 1:
        return enough
    below_largest = int((math.log(largest) - math.log(FILLING)) / math.log(num_ranks)) - 1
    return max(1, min(enough, below_largest))


def summarize(
    seconds: Mapping[tuple[str, str | None], Sequence[float]],
    peers: Sequence[str],
    *,
    dtype: str,
    num_bytes: int,
    num_ranks: int,
) -> list[AllReduceTime]:
    """One result for each contestant.

    Args:
        seconds: by communicator and backend, `COPY` among them, and by round: how long one sum took.
        peers: those contestants of whom the best counts: the one that is quickest by the median of its rounds.
    """
    turns = {name: own for (name, backend), own in seconds.items() if backend is None}
    best_peer = quickest(peers, turns)
    results = []
    for (name, backend), own in seconds.items():
        is_copy = name == COPY
        low, middle, high = statistics.quantiles(own, n=4, method="inclusive")
        results.append(
            AllReduceTime(
                communicator=name,
                backend=backend,
                dtype=dtype,
                bytes=num_bytes,
                median_ms=round(1000 * middle, 6),
                quartiles_ms=(round(1000 * low, 6), round(1000 * high, 6)),
                bus_gb_per_s=None if is_copy else round(bus_bandwidth(num_bytes, middle, num_ranks), 6),
                of_memory=median_ratio(turns[COPY], own, decimals=6),
                ratio=None if is_copy or best_peer is None else median_ratio(own, turns[best_peer]),
            )
        )
    return results
