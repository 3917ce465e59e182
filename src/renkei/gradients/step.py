"""What a reducer remembers of the step it is in, and of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from renkei.errors import UsageError

if TYPE_CHECKING:
    from renkei.gradients.reducer import Reducer


@dataclass(eq=False)
class Backward:
    """A backward pass whose end is known beforehand.

    Attributes:
        weight: what its loss was multiplied by; None if the loss is plain.
        reducers: those whose gradients it computes.
    """

    weight: float | None
    reducers: list[Reducer] = field(default_factory=list)


@dataclass
class Step:
    """What has happened since `zero_grad`.

    Attributes:
        num_exchanges: exchanges begun.
        is_exchanged: whether ``.grad`` holds the mean.
        is_owing: whether there is something that no exchange has been begun for.
        weight: what the losses' weights add up to; None without any.
        is_plain: whether there was a loss without a weight.
        stray: name of a parameter that got a gradient which can't be exchanged any more.
    """

    num_exchanges: int = 0
    is_exchanged: bool = False
    is_owing: bool = False
    weight: float | None = None
    is_plain: bool = False
    stray: str | None = None

    def check_no_stray(self, rank: int) -> None:
        """Raise `UsageError` if there is a gradient that can't be exchanged any more."""
        if self.stray is not None:
            raise UsageError(
                f"rank {rank}: {self.stray} got a gradient that was not exchanged, for it came after step() and before "
                "zero_grad(), or after a weighted backward pass had ended the exchange; call zero_grad() of this "
                "optimizer, not of the model, before each step's first backward pass, and give each loss of a step "
                "its weight"
            )
