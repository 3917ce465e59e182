"""What rides in the tail of the last bucket: a few numbers that only their sum over ranks makes useful.

Because every exchange is a sum, no message of its own is needed to learn the total weight, which parameters any rank
used, whether a rank gave up, and whether all ranks are in the same exchange of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = 5  # weight, position, position squared, gave up, gave up x rank
MODULUS = 31  # positions count in a circle so that the sum of their squares stays exact in fp32 up to 18,000 ranks


@dataclass(frozen=True)
class Ballot:
    """What one rank says about its part of an exchange.

    Attributes:
        rank: which one.
        weight: what its loss was divided by (samples, tokens); 1 where losses simply count equally.
        position: number of this exchange, equal on ranks that are in step.
        gave_up: the rank's backward pass failed half-way, so that its gradients are not to be used.
        used: by parameter, whether the rank has a gradient for it.
    """

    rank: int
    weight: float
    position: int
    gave_up: bool
    used: Sequence[bool]

    def encode(self) -> list[float]:
        """The numbers to be summed over ranks: `HEADER` of them, then one per parameter."""
        position = self.position % MODULUS
        header = [self.weight, position, position * position, self.gave_up, self.gave_up * self.rank]
        return [float(value) for value in (*header, *self.used)]


@dataclass(frozen=True)
class Tally:
    """The sum of all ranks' ballots.

    Attributes:
        weight: total weight.
        is_in_step: whether all ranks were at the same position.
        num_gave_up: how many ranks gave up.
        one_that_gave_up: the rank that did, if only one did.
        users: by parameter, how many ranks have a gradient.
    """

    weight: float
    is_in_step: bool
    num_gave_up: int
    one_that_gave_up: int | None
    users: tuple[int, ...]

    @classmethod
    def decode(cls, total: Sequence[float], num_ballots: int) -> Tally:
        """Read the sum of what `Ballot.encode` gave on each rank.

        Positions are all equal exactly if n x (sum of squares) equals (sum) squared (Cauchy-Schwarz).
        """
        weight, positions, squares, gave_up, ranks = total[:HEADER]
        return cls(
            weight=weight,
            is_in_step=num_ballots * round(squares) == round(positions) ** 2,
            num_gave_up=round(gave_up),
            one_that_gave_up=round(ranks) if round(gave_up) == 1 else None,
            users=tuple(round(count) for count in total[HEADER:]),
        )
