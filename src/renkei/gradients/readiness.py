"""Counting gradients as they come: which buckets may leave, and when all have come. No tensors.

Autograd announces a parameter once per backward pass, except under reentrant checkpointing, where a parameter shared
by several checkpointed blocks is announced once per block. `Learning` watches the first step, during which nothing
leaves early; `Readiness` knows what to expect from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LateGradientError(Exception):
    """A parameter was announced more often than expected: its bucket may have left already."""


@dataclass(frozen=True)
class Habits:
    """How a model's gradients come.

    Attributes:
        expected: by parameter, announcements per backward pass, at least one: what isn't used yet may be later.
        order: the parameters in the order in which their gradients became complete.
    """

    expected: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def agreed(cls, habits: Sequence[Habits]) -> Habits:
        """What suits all ranks: the first one's order, and for each parameter as many announcements as any rank saw."""
        return cls(tuple(max(each) for each in zip(*(one.expected for one in habits), strict=True)), habits[0].order)


class Learning:
    """Watches announcements and lets no bucket leave early."""

    may_be_all = True

    def __init__(self, num_parameters: int) -> None:
        self._expected = [1] * num_parameters
        self._announced = [0] * num_parameters
        self._sequence: list[int] = []

    def restart(self) -> None:
        """A new exchange begins, perhaps within the same backward pass: what was counted stays counted."""

    def announce(self, parameter: int) -> tuple[bool, range]:
        """Note a gradient, which may not be complete; no bucket may leave."""
        self._announced[parameter] += 1
        self._sequence.append(parameter)
        return False, range(0)

    def end_of_backward(self) -> None:
        """What comes now belongs to another backward pass."""
        self._expected = [max(pair) for pair in zip(self._expected, self._announced, strict=True)]
        self._announced = [0] * len(self._announced)

    def learnt(self) -> Habits:
        """What has been seen; parameters that were not come last, in reverse, as if the model ran backwards."""
        self.end_of_backward()
        last_seen = {parameter: at for at, parameter in enumerate(self._sequence)}
        seen = sorted(last_seen, key=last_seen.__getitem__)
        unseen = [parameter for parameter in reversed(range(len(self._expected))) if parameter not in last_seen]
        return Habits(tuple(self._expected), (*seen, *unseen))


class Readiness:
    """Knows when a gradient is complete, and which buckets may leave.

    Args:
        buckets: for each bucket, in sending order, the parameters in it; each parameter is in exactly one.
        expected: by parameter, announcements per exchange.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], expected: Sequence[int]) -> None:
        self._buckets = buckets
        self._bucket_of = {parameter: at for at, bucket in enumerate(buckets) for parameter in bucket}
        self._expected = expected
        self.restart()

    def restart(self) -> None:
        """Begin the next exchange."""
        self._announced = [0] * len(self._expected)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0

    @property
    def may_be_all(self) -> bool:
        """Whether there may be no more to come: every parameter has its complete gradient."""
        return not any(self._missing)

    def announce(self, parameter: int) -> tuple[bool, range]:
        """Note a gradient; returns whether it is complete, and the buckets that may leave because of it.

        Buckets leave strictly in order, whatever the order of gradients, so that all ranks send alike.
        """
        self._announced[parameter] += 1
        if self._announced[parameter] > self._expected[parameter]:
            raise LateGradientError
        if self._announced[parameter] < self._expected[parameter]:
            return False, range(0)
        self._missing[self._bucket_of[parameter]] -= 1
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return True, range(first, self._next)

    def end_of_backward(self) -> None:
        """Nothing is learnt here."""
