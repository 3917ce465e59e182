"""Whose mean a step is made with: that of its own gradients, or that of the step before (double buffering).

    backward pass k               its gradients leave as they become ready
    end of backward pass k        those of k-1, which had a whole step's time, are awaited: ``.grad`` is their mean
    step k                        is made with that

So every gradient is used once, a step late. Two sets of buckets take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from renkei.gradients.ballot import Tally
from renkei.gradients.exchange import Exchange


@dataclass
class _Late:
    """Means that have come, and that no step has been made with.

    Attributes:
        means: by parameter; None for one that no rank had a gradient for.
        loss_scale: what their loss was multiplied by.
        exchange: where they come from.
    """

    means: list[Tensor | None]
    loss_scale: float | None
    exchange: Exchange


class Turns:
    """The exchanges of one plan.

    Args:
        parameters: whose gradients.
        make: makes an exchange; a collective operation.

    Attributes:
        current: the exchange that gradients go to.
        is_late: whether steps are made with the gradients of the step before. Changed while nothing is on its way.
    """

    def __init__(self, parameters: Sequence[Parameter], make: Callable[[], Exchange], *, is_late: bool) -> None:
        self._parameters, self._make = parameters, make
        self.current = make()
        self._exchanges = [self.current]
        self._sent: Exchange | None = None
        self._late: _Late | None = None
        self._used: Exchange | None = None  # whose means are in ``.grad``
        self.is_late = is_late
        if is_late:
            self._other()

    @property
    def waited(self) -> float:
        """Seconds spent so far waiting for sums that had not come when they were needed."""
        return sum(each.waited for each in self._exchanges)

    @property
    def has_late(self) -> bool:
        """Whether there is a gradient that no step has been made with."""
        return self._sent is not None or self._late is not None

    @property
    def has_nothing_to_step_with(self) -> bool:
        """Whether ``.grad`` is nobody's mean: in the first step of those that are late."""
        return self._used is None

    def finish(self) -> Tally | None:
        """Let ``.grad`` be the mean to step with, the current exchange having been sent; returns its tally.

        In the first step of those that are late there is none: gradients are zeros, and so they are in that of a
        parameter whose gradient came when there was none for others.

        Raises:
            GradientError, UsageError: see `Exchange.receive`.
        """
        self._used = None
        if not self.is_late:
            tally = self.current.receive()
            self.current.hand_out(tally)
            self._used = self.current
            return tally
        tally_before = self._hold()
        late, self._late = self._late, None
        now = self.current.loss_scale
        self._sent, self.current = self.current, self._other()
        self._use(late, now)
        return tally_before

    def take_late(self) -> bool:
        """Let ``.grad`` be the means that no step has been made with, not scaled; tells whether there are any."""
        self._hold()
        late, self._late = self._late, None
        if late is not None:
            self._use(late, 1.0)
        return late is not None

    def settle(self) -> None:
        """The step was made with what ``.grad`` is."""
        if self._used is not None:
            self._used.feedback.settle()

    def forget(self) -> None:
        """No step is made any more with what ``.grad`` is, nor with what the current exchange was given."""
        for exchange in (self._used, self.current):
            if exchange is not None and (self._late is None or exchange is not self._late.exchange):
                exchange.feedback.forget()
        self._used = None

    # -- saved and restored ---------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether there is anything to save."""
        return self.is_late or self.current.feedback.is_kept

    def state(self) -> dict[str, Any]:
        """What later steps depend on, for `restore`: what is owed, and what is late, which is awaited. Copies."""
        self._hold()
        late = None
        if self._late is not None:
            means = {at: mean.clone() for at, mean in enumerate(self._late.means) if mean is not None}
            late = {"means": means, "loss_scale": self._late.loss_scale}
        order = [self.current, *(each for each in self._exchanges if each is not self.current)]
        return {"late": late, "feedback": [exchange.feedback.state() for exchange in order]}

    def restore(self, state: Mapping[str, Any], numbers: Sequence[int | None]) -> None:
        """Go on from what `state` told.

        Args:
            numbers: by parameter then, its number now, if it is still there.
        """
        exchanges = [self.current, self._other()] if len(state["feedback"]) > 1 else [self.current]
        for exchange, feedback in zip(exchanges, state["feedback"], strict=True):
            exchange.feedback.restore(feedback, numbers)
        if state["late"] is not None:
            means: list[Tensor | None] = [None] * len(self._parameters)
            for then, mean in state["late"]["means"].items():
                now = numbers[then]
                if now is not None:
                    means[now] = mean.to(self._parameters[now].device)
            self._late = _Late(means, state["late"]["loss_scale"], self._other())

    # -- how ------------------------------------------------------------------------------------------------------

    def _other(self) -> Exchange:
        """The exchange that isn't current."""
        if len(self._exchanges) == 1:
            self._exchanges.append(self._make())
        return next(each for each in self._exchanges if each is not self.current)

    def _hold(self) -> Tally | None:
        """Await what is on its way, which is late then."""
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        tally = sent.receive()
        self._late = _Late(sent.means(tally), sent.loss_scale, sent)
        return tally

    def _use(self, late: _Late | None, loss_scale: float | None) -> None:
        """Let ``.grad`` be means, of a loss multiplied by such a number."""
        for at, parameter in enumerate(self._parameters):
            mean = torch.zeros_like(parameter) if late is None else late.means[at]
            if mean is not None and late is not None and loss_scale != late.loss_scale:
                mean.mul_((loss_scale or 1.0) / (late.loss_scale or 1.0))
            parameter.grad = mean
        self._used = None if late is None else late.exchange
