"""What rides in the tail of the last bucket: a few numbers that only their sum over ranks makes useful.

Because every exchange is a sum, no message of its own is needed to learn the total weight, which parameters any rank
used, whether a rank gave up, and whether all ranks are in the same exchange of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# weight, has no weight, step, step squared, exchange, exchange squared, gave up, gave up x rank, heard
HEADER = 9
MODULUS = 31  # places count in circles so that the sum of their squares stays exact in fp32 up to 18,000 ranks


@dataclass(frozen=True)
class Ballot:
    """What one rank says about its part of an exchange.

    Attributes:
        rank: which one.
        weight: what its loss was divided by (samples, tokens); None where losses simply count equally.
        step, exchange: the place of this exchange, equal on ranks that are in step. Two numbers, so that one more
            exchange in a step is never taken for the first one of another step.
        gave_up: the rank's backward pass failed half-way, so that its gradients are not to be used.
        heard: autograd announced gradients to it, so that it learnt how they come.
        used: by parameter, whether the rank has a gradient for it.
    """

    rank: int
    weight: float | None
    step: int
    exchange: int
    gave_up: bool
    heard: bool
    used: Sequence[bool]

    def encode(self) -> list[float]:
        """The numbers to be summed over ranks: `HEADER` of them, then one per parameter."""
        step, exchange = self.step % MODULUS, self.exchange % MODULUS
        weight = (self.weight or 0.0, self.weight is None)
        place = (step, step * step, exchange, exchange * exchange)
        gave_up = (self.gave_up, self.gave_up * self.rank)
        return [float(value) for value in (*weight, *place, *gave_up, self.heard, *self.used)]


@dataclass(frozen=True)
class Tally:
    """The sum of all ranks' ballots.

    Attributes:
        weight: total weight; ranks that gave none count 1.
        is_mixed: whether some gave a weight and others none.
        is_in_step: whether all ranks were at the same place.
        num_gave_up: how many ranks gave up.
        one_that_gave_up: the rank that did, if only one did.
        num_heard: how many ranks learnt how gradients come.
        counts: by parameter, how many ranks have a gradient; whole numbers.
    """

    weight: float
    is_mixed: bool
    is_in_step: bool
    num_gave_up: int
    one_that_gave_up: int | None
    num_heard: int
    counts: Sequence[float]

    @classmethod
    def decode(cls, total: Sequence[float], num_ballots: int) -> Tally:
        """Read the sum of what `Ballot.encode` gave on each rank."""
        weight, without, step, step_squared, exchange, exchange_squared, gave_up, ranks, heard = total[:HEADER]
        return cls(
            weight=weight + without,
            is_mixed=weight > 0 and without > 0,
            is_in_step=_all_equal(step, step_squared, num_ballots)
            and _all_equal(exchange, exchange_squared, num_ballots),
            num_gave_up=round(gave_up),
            one_that_gave_up=round(ranks) if round(gave_up) == 1 else None,
            num_heard=round(heard),
            counts=total[HEADER:],
        )


def _all_equal(total: float, total_of_squares: float, count: int) -> bool:
    """Whether `count` numbers are equal: exactly then, count x (sum of squares) is (sum) squared (Cauchy-Schwarz)."""
    return count * round(total_of_squares) == round(total) ** 2
