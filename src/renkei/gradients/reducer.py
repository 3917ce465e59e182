"""Exchanging the gradients of one optimizer: during the backward pass, and complete when it returns.

A gradient's way: autograd announces it (`_on_gradient`), it is copied to its place in a bucket and scaled on the way
(`_pack`), the bucket leaves when it is full and those before it have left (`_launch`), and when the backward pass ends
every bucket is awaited and each parameter's ``.grad`` is the mean over ranks (`finish`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from renkei.errors import GradientError, UsageError
from renkei.gradients.backward_pass import current_backward, is_nested, when_it_ends
from renkei.gradients.ballot import HEADER, Ballot, Tally
from renkei.gradients.buckets import BucketSizes, plan_buckets
from renkei.gradients.flat import FlatGradients, size_of
from renkei.gradients.readiness import Habits, LateGradientError, Learning, Readiness


class Work(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Return when the sum is in the buffer; raise if it can't come."""


class Exchange(Protocol):
    """What the reducer asks of whoever carries its buckets; a communicator is one."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def num_addends(self) -> int:
        """How many ranks' buffers a sum consists of."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros for a bucket."""

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Work:
        """Begin to replace a flat buffer by its sum over ranks; `pieces` are views of the tensors it consists of."""


@dataclass
class _Step:
    """What has happened since `zero_grad`.

    Attributes:
        packed: by parameter, whether its gradient is in its bucket.
        works: sums on their way; None between exchanges.
        num_exchanges: exchanges begun.
        is_exchanged: whether ``.grad`` holds the mean.
        weight: what the losses' weights add up to; None without any.
        is_plain: whether there was a loss without a weight.
        stray: a parameter that got a gradient while disarmed.
        backwards: the backward passes whose end will be noticed.
    """

    packed: list[bool]
    works: list[Work] | None = None
    num_exchanges: int = 0
    is_exchanged: bool = False
    weight: float | None = None
    is_plain: bool = False
    stray: int | None = None
    backwards: set[int] = field(default_factory=set)


class Reducer:
    """Exchanges the gradients of `parameters` and keeps the state of doing so.

    Args:
        parameters: those that require a gradient, in an order that is the same on all ranks.
        names: their names, for messages.
        exchange: carries the buckets.
        limits: see `BucketSizes`.
        habits: how gradients come, where that has been learnt; the same order on all ranks.
        before_plain: called before the first gradient of an exchange whose loss carries no weight.

    Attributes:
        accumulating: whether gradients stay on this rank for now.
        waited: seconds spent so far waiting for sums that had not come when they were needed.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        names: Sequence[str],
        exchange: Exchange,
        *,
        limits: BucketSizes,
        habits: Habits | None = None,
        before_plain: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters, self._names = list(parameters), list(names)
        self._exchange = exchange
        self._before_plain = before_plain
        self.plan = plan_buckets(
            [size_of(parameter) for parameter in parameters],
            habits.order if habits else range(len(parameters))[::-1],
            tail=HEADER + len(parameters),
            tail_kind="cpu/float32",
            limits=limits,
        )
        self._flat = FlatGradients(parameters, self.plan, exchange.allocate)
        self._readiness: Readiness | Learning = (
            Readiness([bucket.parameters for bucket in self.plan], habits.expected)
            if habits
            else Learning(len(parameters))
        )
        self.accumulating = False
        self.waited = 0.0
        self._expect_weight(exchange.num_addends)
        self._is_armed = True
        self._times_armed = 0
        self._awaits_caller = False  # `backward_of` will finish what its backward pass begins
        self._step = _Step([False] * len(parameters))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, at))
            for at, parameter in enumerate(parameters)
        ]

    # -- called by the optimizer ----------------------------------------------------------------------------------

    def arm(self) -> None:
        """Gradients that come from now on are this optimizer's; what was begun before is given up."""
        if self._step.works is not None:
            self._give_up()
        self._step = _Step([False] * len(self._parameters))
        self._times_armed += 1
        self._is_armed = True

    def disarm(self) -> None:
        """Gradients that come from now on belong to somebody else's loss (a GAN's other half)."""
        self._is_armed = False

    def close(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()

    @property
    def learnt(self) -> Habits | None:
        """How gradients have come since the start; None if that was known, or nothing has been exchanged yet."""
        if isinstance(self._readiness, Learning) and self._step.num_exchanges:
            return self._readiness.learnt()
        return None

    @property
    def weight(self) -> float:
        """How much this rank counts in the mean."""
        return 1.0 if self._step.weight is None else self._step.weight

    @contextmanager
    def backward_of(self, weight: float) -> Iterator[None]:
        """The backward pass inside is of a loss multiplied by `weight`; the exchange is complete on leaving."""
        if self._step.is_exchanged:
            raise UsageError(
                "a weighted backward pass follows one whose gradients are exchanged already: run all but the last "
                "inside `with optimizer.accumulate():`, or call optimizer.zero_grad() between them"
            )
        self._step.weight = (self._step.weight or 0.0) + weight
        self._awaits_caller = True
        try:
            yield
        finally:
            self._awaits_caller = False
        self._readiness.end_of_backward()
        if not self.accumulating:
            self.finish()

    def complete(self) -> None:
        """Make sure ``.grad`` holds the mean; joins the others' exchange if none was begun on this rank."""
        if self._is_armed and not self._step.is_exchanged:
            self.finish()
        elif self._step.stray is not None:
            raise UsageError(
                f"rank {self._exchange.rank}: {self._names[self._step.stray]} got a gradient after step() and before "
                "zero_grad(), so it was not exchanged; call zero_grad() of this optimizer, not of the model, "
                "before each step's first backward pass"
            )

    def finish(self) -> None:
        """Send what has not left, await all of it, and let ``.grad`` be the mean over ranks."""
        self._begin()
        for at, parameter in enumerate(self._parameters):
            if not self._step.packed[at] and parameter.grad is not None:
                self._pack(at)
        self._launch_rest(gave_up=False)
        total = self._await_sums()
        if total != self._if_unanimous:
            self._settle(Tally.decode(total, self._exchange.num_addends))
        weight = total[0]
        if weight not in (0, self._expected_weight):
            self._flat.scale(self._expected_weight / weight)
            self._expect_weight(weight)
        self._step.is_exchanged = True

    # -- called by autograd ---------------------------------------------------------------------------------------

    def _on_gradient(self, at: int, parameter: Tensor) -> None:
        if not self._is_armed:
            self._step.stray = at
            return
        self._step.is_exchanged = False
        self._step.is_plain |= not self._awaits_caller
        if self.accumulating:
            return
        self._begin()
        self._expect_the_end(parameter)
        try:
            complete, may_leave = self._readiness.announce(at)
        except LateGradientError:
            raise GradientError(
                f"rank {self._exchange.rank}: {self._names[at]} got one gradient more than in the first step: under "
                "reentrant checkpointing a parameter must be used equally often in every step; use "
                "checkpoint(..., use_reentrant=False) or run the backward pass inside `with optimizer.accumulate():`"
            ) from None
        if complete:
            self._pack(at)
        for bucket in may_leave:
            self._launch(bucket)

    def _expect_the_end(self, parameter: Tensor) -> None:
        backward = current_backward()
        if backward not in self._step.backwards:
            self._step.backwards.add(backward)
            when_it_ends(partial(self._on_end_of_backward, nested=is_nested(parameter)))

    def _on_end_of_backward(self, nested: bool) -> None:
        if not nested:
            self._readiness.end_of_backward()
        if self._step.works is None or self._awaits_caller:
            return
        if nested and isinstance(self._readiness, Readiness) and not self._readiness.all_have_come:
            return  # the pass around this one has more to come
        # While learning, each nested pass is exchanged by itself: the mean of (a mean + more) is the mean of all.
        self.finish()

    # -- one exchange ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._step.works is not None:
            return
        if self._step.weight is None:
            self._before_plain()
        elif self._step.is_plain:
            raise UsageError("weighted and plain backward passes are mixed in one step: give each loss its weight")
        self._step.works = []
        self._step.packed = [False] * len(self._parameters)
        self._step.backwards = set()
        self._step.num_exchanges += 1
        self._readiness.restart()
        self._vote(gave_up=False, used=[True] * len(self._parameters))  # most likely; done now, not when time is short

    def _pack(self, at: int) -> None:
        gradient = self._parameters[at].grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"rank {self._exchange.rank}: {self._names[at]} has a sparse gradient, which can't be put in a "
                "bucket; build the layer with sparse=False"
            )
        self._flat.pack(at, self._scale)
        self._step.packed[at] = True

    def _launch(self, bucket: int) -> None:
        assert self._step.works is not None
        self._step.works.append(self._exchange.start_sum(self._flat.buffers[bucket], self._flat.pieces[bucket]))

    def _launch_rest(self, *, gave_up: bool) -> None:
        assert self._step.works is not None
        if len(self._step.works) < len(self.plan) and (gave_up or not all(self._step.packed)):
            self._vote(gave_up=gave_up, used=self._step.packed)
            for at, is_packed in enumerate(self._step.packed):
                if not is_packed:
                    self._flat.clear(at)
        for bucket in range(len(self._step.works), len(self.plan)):
            self._launch(bucket)

    def _vote(self, *, gave_up: bool, used: Sequence[bool]) -> None:
        position = 7 * self._times_armed + self._step.num_exchanges
        ballot = Ballot(self._exchange.rank, self.weight, position, gave_up, used).encode()
        self._flat.tail.copy_(torch.tensor(ballot))
        self._if_unanimous = [self._exchange.num_addends * value for value in ballot]

    def _await_sums(self) -> list[float]:
        assert self._step.works is not None
        begin = time.perf_counter()
        for work in self._step.works:
            work.wait()
        self.waited += time.perf_counter() - begin
        self._step.works = None
        return self._flat.tail.tolist()

    def _expect_weight(self, weight: float) -> None:
        """Let gradients be divided by this total weight on their way; if it turns out another, once more after."""
        self._expected_weight = weight
        self._scale = torch.tensor(1 / weight, dtype=torch.float64)  # multiplies twice as quickly as a number would

    def _settle(self, tally: Tally) -> None:
        """Ranks differ: in what they used, which is dealt with, or in where they are, which is an error on all."""
        if tally.num_gave_up:
            one = tally.one_that_gave_up
            who = f"rank {one}" if one is not None else f"{tally.num_gave_up} ranks"
            raise GradientError(
                f"{who} gave up the backward pass of this step (an exception was caught there): its gradients are "
                "missing, so no rank may use this step's; catch the exception on every rank and call zero_grad()"
            )
        if not tally.is_in_step:
            raise GradientError(
                f"rank {self._exchange.rank}: ranks exchange gradients of different steps or backward passes; every "
                "rank must call zero_grad(), backward() and step() equally often (backward(None) where it has no data)"
            )
        for at, is_packed in enumerate(self._step.packed):
            if tally.users[at] and not is_packed:
                self._flat.hand_out(at)

    def _give_up(self) -> None:
        """An exception has ended a backward pass half-way: let the others' exchange end, and let them know."""
        self._launch_rest(gave_up=True)
        self._await_sums()
