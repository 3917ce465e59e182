"""State that counts only once the step it was changed in was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor


class Tentative:
    """A tensor that each step changes. A step that is skipped (an infinite gradient, an exception) changes nothing.

    Attributes:
        settled: as of the last step that was made; None before the first.
        pending: as of the step that isn't made yet, if one has begun.
    """

    def __init__(self) -> None:
        self.settled: Tensor | None = None
        self.pending: Tensor | None = None
        self._before: Tensor | None = None

    def begin(self, first: Callable[[], Tensor]) -> Tensor:
        """What it is now, to be changed in place; what `first` makes in the beginning."""
        self._before = self.settled if self.pending is None else self.pending  # a second exchange of one step
        self.pending = first() if self._before is None else self._before.clone()
        return self.pending

    def undo(self) -> None:
        """What was begun last was for nothing."""
        self.pending = None if self._before is self.settled else self._before
        self._before = None

    def scale(self, factor: float) -> None:
        """What this counts is so many times as large from now on."""
        for each in (self.settled, self.pending):
            if each is not None:
                each.mul_(factor)

    def reweigh(self, factor: float) -> None:
        """What was begun last was multiplied by a factor on the other side, although what there was before was not."""
        if self.pending is not None:
            self.pending.mul_(factor)
            if self._before is not None:
                self.pending.add_(self._before, alpha=1 - factor)

    def leave(self, begin: int, end: int) -> None:
        """What was begun last was for nothing between these places."""
        if self.pending is not None:
            self.pending[begin:end] = 0.0 if self._before is None else self._before[begin:end]

    def state(self) -> dict[str, Tensor]:
        """What there is of "settled" and "pending"."""
        both = {"settled": self.settled, "pending": self.pending}
        return {when: whole for when, whole in both.items() if whole is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Be what `state` told."""
        self.settled, self.pending, self._before = state.get("settled"), state.get("pending"), None

    def settle(self) -> None:
        """The step was made."""
        if self.pending is not None:
            self.settled = self.pending
        self.forget()

    def forget(self) -> None:
        """The step was skipped."""
        self.pending = self._before = None
