"""Exchanging the gradients of one optimizer: during the backward pass, and complete when it returns.

A gradient's way: autograd announces it (`_on_gradient`), it is copied to its place in a bucket and scaled on the way
(`Exchange.pack`), the bucket leaves when it is full and those before it have left (`Exchange.launch`), and when the
backward pass ends every bucket is awaited and each parameter's ``.grad`` is the mean over ranks (`finish`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from renkei.errors import GradientError, UsageError
from renkei.gradients.backward_pass import Endings, carried, carrying, when_it_ends
from renkei.gradients.ballot import HEADER, Ballot
from renkei.gradients.buckets import BucketSizes, plan_buckets
from renkei.gradients.compression.formats import Fp32, WireFormat
from renkei.gradients.compression.wire import Carrier
from renkei.gradients.exchange import Exchange
from renkei.gradients.flat import size_of
from renkei.gradients.readiness import Habits, LateGradientError, Learning, Readiness
from renkei.gradients.step import Backward, Step
from renkei.gradients.turns import Turns


def _announce(reducer: weakref.ref[Reducer], at: int, parameter: Tensor) -> None:
    """Tell a reducer of a gradient. Weakly: Python can't see, and so not free, a cycle through a tensor's hook."""
    alive = reducer()
    if alive is not None:
        with alive._lock:
            alive._on_gradient(at, parameter)


class Reducer:
    """Knows when which gradients of `parameters` are to be exchanged.

    Args:
        parameters: those that require a gradient, in an order that is the same on all ranks.
        names: their names, for messages.
        carrier: carries the buckets.
        limits: see `BucketSizes`.
        habits: how gradients come, where that has been learnt; the same order on all ranks.
        before_plain: called before the first gradient of an exchange whose loss carries no weight.
        wire_format: how the buckets travel.
        loss_scale: tells what losses are multiplied by now, if that changes.
        is_late, keeps_own: see `Turns`.

    Attributes:
        accumulating: whether gradients stay on this rank for now.
        habits: as given.
        has_learnt: whether some rank has seen how gradients come, which wasn't known before.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        names: Sequence[str],
        carrier: Carrier,
        *,
        limits: BucketSizes,
        habits: Habits | None = None,
        before_plain: Callable[[], None] = lambda: None,
        wire_format: WireFormat | None = None,
        loss_scale: Callable[[], float] | None = None,
        is_late: bool = False,
        keeps_own: bool = False,
    ) -> None:
        wire_format = wire_format or Fp32()
        self._parameters, self._names = list(parameters), list(names)
        self._carrier = carrier
        self._before_plain = before_plain
        self.plan = plan_buckets(
            [size_of(parameter, keeps_32_bits=wire_format.is_exact) for parameter in parameters],
            habits.order if habits else range(len(parameters))[::-1],
            tail=HEADER + len(parameters),
            tail_kind="cpu/float32",
            limits=limits,
        )
        self.habits = habits
        self.turns = Turns(
            self._parameters,
            lambda: Exchange(self._parameters, self._names, self.plan, carrier, wire_format),
            is_late=is_late,
            keeps_own=keeps_own,
        )
        self._loss_scale = loss_scale
        self._readiness: Readiness | Learning = (
            Readiness([bucket.parameters for bucket in self.plan], habits.expected)
            if habits
            else Learning(len(parameters))
        )
        self.accumulating = False
        self.has_learnt = False
        self._is_armed = True
        self._place = 0  # counts what all ranks must do equally often
        self._step = Step()
        self._endings = Endings(self._on_end_of_backward)
        self._lock = threading.RLock()  # autograd has a thread for each device that parameters are on
        self._backward: Backward | None = None  # the last one that this took part in
        self._has_told_of_waste = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_announce, weakref.ref(self), at))
            for at, parameter in enumerate(parameters)
        ]

    # -- called by the optimizer ----------------------------------------------------------------------------------

    def arm(self) -> None:
        """Gradients that come from now on are this optimizer's; what was begun before is given up."""
        if self._step.is_owing and not self._exchange.is_open:
            self._open(heard=False)
        if self._exchange.is_open:
            self._exchange.give_up()
            if self.turns.is_late:
                raise GradientError(
                    f"rank {self._carrier.rank} gave up a backward pass (an exception was caught): with "
                    "double_buffering the other ranks learn of that when they have made a step more than this one; end "
                    "the job, and resume it"
                )
        if isinstance(self._readiness, Learning) and not self.has_learnt:
            self._readiness = Learning(len(self._parameters))
        self.turns.forget()
        self._step = Step()
        self._place += 1
        self._is_armed = True

    def disarm(self) -> None:
        """The step was made: gradients that come from now on belong to somebody else's loss (a GAN's other half)."""
        self.turns.settle()
        self._place += 7
        self._is_armed = False

    def close(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()

    @property
    def weight(self) -> float:
        """How much this rank counts in the mean."""
        return 1.0 if self._step.weight is None else self._step.weight

    @property
    def num_exchanges(self) -> int:
        """How many exchanges were begun since `arm`."""
        return self._step.num_exchanges

    @property
    def is_between_steps(self) -> bool:
        """Whether no backward pass has begun that no step was made with."""
        begun = self._step.is_exchanged or self._step.is_owing or self._exchange.is_open or self.accumulating
        return not (self._is_armed and begun)

    @property
    def parameters(self) -> list[Parameter]:
        """Whose gradients."""
        return self._parameters

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        return self._names

    @property
    def _exchange(self) -> Exchange:
        return self.turns.current

    @property
    def waited(self) -> float:
        """Seconds spent so far waiting for sums that had not come when they were needed."""
        return self.turns.waited

    def learnt(self) -> Habits:
        """How gradients have come on this rank."""
        assert isinstance(self._readiness, Learning)
        return self._readiness.learnt()

    def meet(self, why: int) -> None:
        """Exchange nothing: ranks that are about to do something else than this one learn it here, all of them.

        Args:
            why: a number, not above zero, that tells what this rank is about to do.
        """
        if self._exchange.is_open:
            self._exchange.give_up()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # what is in the buffers now will be gone
        self._exchange.begin(self._ballot(exchange=why, weight=0.0, heard=False))
        self._exchange.send_rest()
        self._exchange.receive()
        self._exchange.feedback.undo()

    def take_over(self, other: Reducer) -> None:
        """Go on where `other` was, with the same or other parameters."""
        self._step, self._is_armed, self.accumulating = other._step, other._is_armed, other.accumulating
        self._has_told_of_waste = other._has_told_of_waste
        numbers = {parameter: at for at, parameter in enumerate(self._parameters)}
        then = enumerate(other._parameters)
        self.turns.take_over(other.turns, {at: numbers[each] for at, each in then if each in numbers})

    @contextmanager
    def backward_of(self, weight: float | None) -> Iterator[None]:
        """The backward pass inside is of a loss multiplied by `weight`; there is one exchange, complete on leaving.

        That holds for all armed reducers whose parameters it reaches.
        """
        if not self._is_armed:
            raise UsageError("optimizer.backward() was called after step(): call optimizer.zero_grad() before it")
        backward = Backward(weight)
        self._join(backward)
        with carrying(backward):
            yield
        reducers = [reducer for reducer in backward.reducers if not reducer.accumulating]
        for reducer in reducers:
            reducer._readiness.end_of_backward()
            reducer._send()
        for reducer in reducers:
            reducer._receive()

    def complete(self) -> None:
        """Make sure ``.grad`` holds the mean; joins the others' exchange if none was begun on this rank."""
        if self._is_armed and not self._step.is_exchanged:
            self.finish()
        else:
            self._step.check_no_stray(self._carrier.rank)

    def finish(self) -> None:
        """Send what has not left, await all of it, and let ``.grad`` be the mean over ranks."""
        self._send()
        self._receive()

    # -- called by autograd ---------------------------------------------------------------------------------------

    def _on_gradient(self, at: int, parameter: Tensor) -> None:
        step = self._step
        if not self._is_armed or (step.is_exchanged and step.weight is not None):
            step.stray = self._names[at]
            return
        backward = carried()
        if backward is None:
            step.is_plain = True
            if step.is_exchanged:
                self._exchange_again()
        elif backward is not self._backward:
            self._join(backward)
        if self.accumulating:
            step.is_owing = True
            return
        self._begin(heard=True)
        self._endings.notice(parameter)
        try:
            complete, may_leave = self._readiness.announce(at)
        except LateGradientError:
            raise GradientError(
                f"rank {self._carrier.rank}: {self._names[at]} got one gradient more than in the first step: under "
                "reentrant checkpointing a parameter must be used equally often in every step; use "
                "checkpoint(..., use_reentrant=False) or run the backward pass inside `with optimizer.accumulate():`"
            ) from None
        if complete:
            self._exchange.pack(at)
        for bucket in may_leave:
            self._exchange.launch(bucket)

    def _join(self, backward: Backward) -> None:
        step = self._step
        if backward.weight is None:
            step.is_plain = True
        elif step.is_exchanged:
            raise UsageError(
                "a weighted backward pass follows one whose gradients are exchanged already: run all but the last "
                "inside `with optimizer.accumulate():`, or call optimizer.zero_grad() between them"
            )
        else:
            step.weight = (step.weight or 0.0) + backward.weight
        step.is_owing = True
        if step.is_exchanged:
            self._exchange_again()
        self._backward = backward
        backward.reducers.append(self)

    def _on_end_of_backward(self, nested: bool) -> None:
        if carried() is not None:
            return  # `backward_of` sees to it
        if not nested:
            self._readiness.end_of_backward()
        elif not self._readiness.may_be_all:
            return  # the pass around this one has more to come
        if self._exchange.is_open:
            self._send()
            when_it_ends(self._receive)  # once all optimizers have sent: ranks may differ in whose gradients came first

    # -- one exchange ---------------------------------------------------------------------------------------------

    def _begin(self, *, heard: bool) -> None:
        if self._exchange.is_open:
            return
        self._step.is_owing = True
        if self._step.weight is None:
            self._before_plain()
        elif self._step.is_plain:
            raise UsageError("weighted and plain backward passes are mixed in one step: give each loss its weight")
        self._open(heard=heard)

    def _open(self, *, heard: bool) -> None:
        self._step.is_owing = False
        self._step.num_exchanges += 1
        self._endings.restart()
        self._readiness.restart()
        ballot = self._ballot(exchange=self._step.num_exchanges, weight=self._step.weight, heard=heard)
        self._exchange.begin(ballot, None if self._loss_scale is None else self._loss_scale())

    def _ballot(self, *, exchange: int, weight: float | None, heard: bool) -> Ballot:
        """What is most likely: made at the start, when time isn't short."""
        return Ballot(
            rank=self._carrier.rank,
            weight=weight,
            step=self._place,
            exchange=exchange,
            gave_up=False,
            heard=heard,
            used=[True] * len(self._parameters),
        )

    def _send(self) -> None:
        self._begin(heard=False)
        self._step.is_owing = False
        for at, parameter in enumerate(self._parameters):
            if not self._exchange.packed[at] and parameter.grad is not None:
                self._exchange.pack(at)
        self._exchange.send_rest()

    def _receive(self) -> None:
        tally = self.turns.finish()
        self._step.is_exchanged = True
        if isinstance(self._readiness, Learning) and tally is not None and tally.num_heard:
            self.has_learnt = True

    def _exchange_again(self) -> None:
        if self.turns.is_late:
            raise UsageError(
                "a second backward pass in one step can't be exchanged with double_buffering, for .grad holds the step "
                "before's mean; run all but the last inside `with optimizer.accumulate():`"
            )
        self._step.is_exchanged = False
        if self.accumulating or isinstance(self._readiness, Learning) or self._has_told_of_waste:
            return
        self._has_told_of_waste = True
        if self._carrier.rank == 0:
            print(
                "renkei: a second backward pass in one step sends all gradients again; run all but the last inside "
                "`with optimizer.accumulate():`",
                file=sys.stderr,
                flush=True,
            )
