"""One exchange after another of the same gradients: packed into buckets, summed over ranks, read as a mean."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from renkei.errors import GradientError, UsageError
from renkei.gradients.ballot import Ballot, Tally
from renkei.gradients.buckets import Bucket
from renkei.gradients.compression.feedback import Feedback
from renkei.gradients.compression.formats import WireFormat
from renkei.gradients.compression.wire import Carrier, Work
from renkei.gradients.flat import FlatGradients


class Exchange:
    """Carries the gradients of `parameters`, over and over: `begin`, `pack`, `launch`, `send_rest`, `receive`.

    Args:
        parameters, names: whose gradients, and what to call them in messages.
        plan: the buckets, the same on all ranks.
        carrier: carries them.
        wire_format: how they travel.

    Attributes:
        is_open: whether one has begun and not ended.
        loss_scale: what the loss of the last one was multiplied by, if that changes.
        packed: by parameter, whether its gradient is in its bucket.
        waited: seconds spent so far waiting for sums that had not come when they were needed.
        feedback: what has been lost on the way and is still to be given.
        expected_weight: the total weight of the last exchange, by which gradients of the next are divided on their way.
        keeps_own: whether this rank's own gradients are kept while those of all ranks are on their way.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        names: Sequence[str],
        plan: Sequence[Bucket],
        carrier: Carrier,
        wire_format: WireFormat,
    ) -> None:
        self._parameters, self._names, self._carrier = parameters, names, carrier
        self._flat = FlatGradients(parameters, plan, carrier.allocate)
        self._wires = [
            wire_format.wire_for(buffer.dtype, [parameters[at].shape for at in bucket.parameters])
            for bucket, buffer in zip(plan, self._flat.buffers, strict=True)
        ]
        self.feedback = Feedback(plan, self._wires, self._flat.buffers)
        self._works: list[Work] = []
        self.expect_weight(carrier.num_addends)
        self.is_open = False
        self.loss_scale: float | None = None
        self.packed = [False] * len(parameters)
        self.waited = 0.0
        self.keeps_own = False
        self._own: list[Tensor | None] = [None] * len(parameters)

    def begin(self, ballot: Ballot, loss_scale: float | None = None) -> None:
        """Open the next exchange. What `ballot` says of parameters and of giving up is corrected before it is sent.

        Args:
            loss_scale: what the loss is multiplied by, if that changes.
        """
        self.is_open, self.loss_scale = True, loss_scale
        if loss_scale is not None:
            self.feedback.follow(loss_scale)
        self.packed = [False] * len(self._parameters)
        self._vote(ballot)

    def pack(self, at: int) -> None:
        """Put a complete gradient into its bucket; ``.grad`` is then a view of that."""
        gradient = self._parameters[at].grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"rank {self._carrier.rank}: {self._names[at]} has a sparse gradient, which can't be put in a bucket; "
                "build the layer with sparse=False"
            )
        if self.keeps_own:
            self._own[at] = gradient.detach() if not self._flat.holds(gradient) else gradient.clone()
        self._flat.pack(at, self._scale)
        self.packed[at] = True

    def launch(self, bucket: int) -> None:
        """Send the next bucket."""
        buffer, pieces = self._flat.buffers[bucket], self._flat.pieces[bucket]
        self._works.append(self._wires[bucket].start_sum(self._carrier, buffer, pieces))

    def send_rest(self, *, gave_up: bool = False) -> None:
        """Send the buckets that haven't left, with zeros for the gradients there aren't."""
        num_buckets = len(self._flat.buffers)
        if len(self._works) < num_buckets and (gave_up or not all(self.packed)):
            self._vote(replace(self._ballot, gave_up=gave_up, used=self.packed))
            for at, is_packed in enumerate(self.packed):
                if not is_packed:
                    self._flat.clear(at)
        for bucket in range(len(self._works), num_buckets):
            self.launch(bucket)

    def receive(self) -> Tally:
        """Await the sums and let what the buckets hold be the mean over ranks.

        Raises:
            GradientError, UsageError: on every rank, if there is no mean because ranks were not doing the same.
        """
        total = self._await_sums()
        tally = Tally.decode(total, self._carrier.num_addends)
        if total != self._if_unanimous:
            self._check(tally)
        if self.feedback.is_kept and not all(tally.counts):
            for at, count in enumerate(tally.counts):
                if not count:
                    self.feedback.leave(at)
        if tally.weight not in (0, self.expected_weight):
            self._flat.scale(self.expected_weight / tally.weight)
            self.feedback.reweigh(self.expected_weight / tally.weight)
            self.expect_weight(tally.weight)
        return tally

    def hand_out(self, tally: Tally) -> None:
        """Let each ``.grad`` be the mean, those of parameters too that this rank had no gradient for."""
        for at, is_packed in enumerate(self.packed):
            if tally.counts[at] and not is_packed:
                self._flat.hand_out(at)

    def means(self, tally: Tally) -> list[Tensor | None]:
        """By parameter, a view of its mean; None for one that no rank had a gradient for."""
        return [self._flat.view(at) if count else None for at, count in enumerate(tally.counts)]

    def take_own(self) -> list[Tensor | None]:
        """By parameter, this rank's own gradient in the last exchange, of its plain mean loss, if there was one."""
        own, self._own = self._own, [None] * len(self._parameters)
        weight = 1.0 if self._ballot.weight is None else self._ballot.weight
        scale = weight * (self.loss_scale or 1.0)
        if not scale:
            return [None] * len(own)
        return [each if each is None or scale == 1 else each / scale for each in own]

    def give_up(self) -> None:
        """Let the others' exchange end, and let them know that this rank's gradients are missing from it."""
        self.send_rest(gave_up=True)
        self._await_sums()

    def _vote(self, ballot: Ballot) -> None:
        self._ballot = ballot
        encoded = ballot.encode()
        self._flat.tail.copy_(torch.tensor(encoded, device="cpu"))
        self._if_unanimous = [self._carrier.num_addends * value for value in encoded]

    def _await_sums(self) -> list[float]:
        works, self._works, self.is_open = self._works, [], False
        if self._flat.tail.is_cuda:  # what is still being computed is not waited for
            torch.cuda.current_stream(self._flat.tail.device).synchronize()
        begin = time.perf_counter()
        for work in works:
            work.wait()
        total = self._flat.tail.tolist()  # on a GPU, this is what waits
        self.waited += time.perf_counter() - begin
        return total

    def expect_weight(self, weight: float) -> None:
        """Let gradients be divided by this total weight on their way; if it turns out another, once more after."""
        self.expected_weight = weight
        # a tensor, which multiplies twice as quickly as a number would
        self._scale = torch.tensor(1 / weight, dtype=torch.float64, device="cpu")

    def _check(self, tally: Tally) -> None:
        if tally.num_gave_up:
            one = tally.one_that_gave_up
            who = f"rank {one}" if one is not None else f"{tally.num_gave_up} ranks"
            raise GradientError(
                f"{who} gave up the backward pass of this step (an exception was caught there): its gradients are "
                "missing, so no rank may use this step's; catch the exception on every rank and call zero_grad()"
            )
        if not tally.is_in_step:
            raise GradientError(
                f"rank {self._carrier.rank}: ranks exchange gradients of different steps or backward passes; every "
                "rank must call zero_grad(), backward() and step() equally often (backward(None) where it has no "
                "data), and change requires_grad or parameter groups in the same step"
            )
        if tally.is_mixed:
            raise UsageError(
                f"rank {self._carrier.rank}: some ranks gave their loss a weight and others did not; give it on all "
                "of them, and call backward(None) of each optimizer on those that have no samples"
            )
