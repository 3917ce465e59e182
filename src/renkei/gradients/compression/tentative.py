"""State that counts only once the step it was changed in was made."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Tentative:
    """A tensor that each step changes. A step that is skipped (an infinite gradient, an exception) changes nothing.

    Attributes:
        settled: as of the last step that was made; None before the first.
    """

    def __init__(self) -> None:
        self.settled: Tensor | None = None
        self._pending: Tensor | None = None
        self._before: Tensor | None = None

    @property
    def latest(self) -> Tensor | None:
        """As of the last step that was begun."""
        return self.settled if self._pending is None else self._pending

    def begin(self, first: Callable[[], Tensor]) -> Tensor:
        """What it is now, to be changed in place; what `first` makes in the beginning."""
        self._before = self.latest  # of this step, if it has a second exchange
        self._pending = first() if self._before is None else self._before.clone()
        return self._pending

    def scale(self, factor: float) -> None:
        """What this counts is so many times as large from now on."""
        if self.settled is not None:
            self.settled.mul_(factor)

    def reweigh(self, factor: float) -> None:
        """What was begun last was multiplied by a factor on the other side, although what there was before was not."""
        if self._pending is not None:
            self._pending.mul_(factor)
            if self._before is not None:
                self._pending.add_(self._before, alpha=1 - factor)

    def settle(self) -> None:
        """The step was made."""
        if self._pending is not None:
            self.settled = self._pending
        self.forget()

    def forget(self) -> None:
        """The step was skipped."""
        self._pending = self._before = None
