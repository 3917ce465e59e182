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
        tally: what came with them; None where they were loaded.
    """

    means: list[Tensor | None]
    loss_scale: float | None
    exchange: Exchange
    tally: Tally | None


class Turns:
    """The exchanges of one plan.

    Args:
        parameters: whose gradients.
        make: makes an exchange; a collective operation.

    Attributes:
        current: the exchange that gradients go to.
        is_late: whether steps are made with the gradients of the step before.
        has_nothing_to_step_with: whether ``.grad`` is nobody's mean: in the first step of those that are late.
        own: by parameter, this rank's own gradient of those whose mean is late, if `keeps_own`.
        keeps_own: whether to keep them.
    """

    def __init__(
        self, parameters: Sequence[Parameter], make: Callable[[], Exchange], *, is_late: bool, keeps_own: bool = False
    ) -> None:
        self._parameters, self._make, self.keeps_own = parameters, make, keeps_own
        self.own: list[Tensor | None] | None = None
        self.current = make()
        self._exchanges = [self.current]
        self._sent: Exchange | None = None
        self._late: _Late | None = None
        self._used: Exchange | None = None  # whose means are in ``.grad``
        self.has_nothing_to_step_with = False
        self.is_late = False
        if is_late:
            self.become_late()

    @property
    def waited(self) -> float:
        """Seconds spent so far waiting for sums that had not come when they were needed."""
        return sum(each.waited for each in self._exchanges)

    def become_late(self) -> None:
        """From now on make steps with the gradients of the step before; a collective operation."""
        self._other()
        for exchange in self._exchanges:
            exchange.keeps_own = self.keeps_own
        self.is_late = True

    def become_punctual(self) -> None:
        """From now on make steps with their own gradients; nothing may be late."""
        assert self._sent is None
        assert self._late is None
        for exchange in self._exchanges:
            if exchange is not self.current:
                self.current.feedback.absorb(exchange.feedback)
            exchange.keeps_own = False
        self.is_late = False

    def finish(self) -> Tally | None:
        """Let ``.grad`` be the mean to step with, the current exchange having been sent; returns what came with it.

        In the first step of those that are late there is none, and all gradients are zeros.

        Raises:
            GradientError, UsageError: see `Exchange.receive`.
        """
        self._used, self.has_nothing_to_step_with = None, False
        if not self.is_late:
            tally = self.current.receive()
            self.current.hand_out(tally)
            self._used = self.current
            return tally
        self._hold()
        late, self._late = self._late, None
        loss_scale = self.current.loss_scale
        self._sent, self.current = self.current, self._other()
        self.own = self._sent.take_own() if self.keeps_own else None
        self.has_nothing_to_step_with = late is None
        self._use(late, loss_scale)
        return None if late is None else late.tally

    def take_late(self) -> bool:
        """Let ``.grad`` be the means that no step has been made with, not scaled; tells whether there are any."""
        self._hold()
        late, self._late, self.own = self._late, None, None
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
            if exchange is not None and not self._is_late(exchange):
                exchange.feedback.forget()
        self._used = None

    def _is_late(self, exchange: Exchange) -> bool:
        """Whether its means are still to be used: those that were loaded may come from any."""
        return exchange is self._sent or (self._late is not None and exchange is self._late.exchange)

    # -- saved and restored ---------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether there is anything to save."""
        return self.is_late or self.current.feedback.is_kept

    def state(self) -> dict[str, Any]:
        """What later steps depend on, for `restore`: what is owed, and what is late, which is awaited. Copies."""
        self._hold()
        late = None
        order = self._in_order()
        if self._late is not None:
            means = {at: mean.clone() for at, mean in enumerate(self._late.means) if mean is not None}
            late = {"means": means, "loss_scale": self._late.loss_scale, "exchange": order.index(self._late.exchange)}
        used = None if self._used is None else order.index(self._used)
        own = None if self.own is None else {at: each.clone() for at, each in enumerate(self.own) if each is not None}
        feedback = [exchange.feedback.state() for exchange in order]
        weights = [exchange.expected_weight for exchange in order]  # another would round otherwise
        return {"late": late, "used": used, "own": own, "weights": weights, "feedback": feedback}

    def restore(self, state: Mapping[str, Any], numbers: Mapping[int, int]) -> None:
        """Go on from what `state` told, and forget all else; a collective operation.

        Args:
            numbers: by parameter then, its number now, of those that are still there; the others' is forgotten.
        """
        self.clear()
        if len(state["feedback"]) > 1:
            self._other()
        order = self._in_order()
        for exchange, weight, feedback in zip(order, state["weights"], state["feedback"], strict=False):
            exchange.expect_weight(weight)
            exchange.feedback.restore(feedback, numbers)
        self._used = None if state["used"] is None else order[state["used"]]
        self.own = None if state["own"] is None else self._by_parameter(state["own"], numbers)
        late = state["late"]
        if late is not None:
            means = self._by_parameter(late["means"], numbers)
            self._late = _Late(means, late["loss_scale"], order[late["exchange"]], None)

    def _by_parameter(self, then: Mapping[int, Tensor], numbers: Mapping[int, int]) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(self._parameters)
        for at, gradient in then.items():
            if at in numbers:
                parameter = self._parameters[numbers[at]]
                found[numbers[at]] = gradient.to(parameter.device, parameter.dtype)
        return found

    def take_over(self, other: Turns, numbers: Mapping[int, int]) -> None:
        """Go on where `other` was, with other buckets or parameters: see `restore`."""
        self.restore(other.state(), numbers)
        self.has_nothing_to_step_with = other.has_nothing_to_step_with
        if self._late is not None and other._late is not None:
            self._late.tally = other._late.tally

    def inherit(self, other: Turns) -> None:
        """Owe what `other`, of the same parameters, owed before its last exchanges, which were for nothing."""
        numbers = {at: at for at in range(len(self._parameters))}
        mine = self._in_order()
        for at, exchange in enumerate(other._in_order()):
            exchange.feedback.forget()
            if at < len(mine):
                mine[at].feedback.restore(exchange.feedback.state(), numbers)
            else:
                mine[0].feedback.absorb(exchange.feedback)

    def clear(self) -> None:
        """Forget all there was; what is on its way is awaited."""
        self._hold()
        self._late = self._used = self.own = None
        for exchange in self._exchanges:
            exchange.feedback.clear()

    # -- how ------------------------------------------------------------------------------------------------------

    def _other(self) -> Exchange:
        """The exchange that isn't current."""
        if len(self._exchanges) == 1:
            self._exchanges.append(self._make())
        return next(each for each in self._exchanges if each is not self.current)

    def _in_order(self) -> list[Exchange]:
        """The current exchange, and the other if there is one."""
        return [self.current, *(each for each in self._exchanges if each is not self.current)]

    def _hold(self) -> None:
        """Await what is on its way, which is late then."""
        sent, self._sent = self._sent, None
        if sent is not None:
            tally = sent.receive()
            self._late = _Late(sent.means(tally), sent.loss_scale, sent, tally)

    def _use(self, late: _Late | None, loss_scale: float | None) -> None:
        """Let ``.grad`` be means, of a loss multiplied by such a number."""
        for at, parameter in enumerate(self._parameters):
            mean = torch.zeros_like(parameter) if late is None else late.means[at]
            if mean is not None and late is not None and loss_scale != late.loss_scale:
                mean.mul_((loss_scale or 1.0) / (late.loss_scale or 1.0))
            parameter.grad = mean
        self._used = None if late is None else late.exchange
