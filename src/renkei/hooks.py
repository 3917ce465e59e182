"""Compressed gradients for those who stay with DistributedDataParallel.

state = renkei.hooks.State()
ddp.register_comm_hook(state, renkei.hooks.int8_mean)

Each hook replaces a bucket of 32-bit gradients by its mean over ranks, which travels as one of the formats of
`renkei.gradients.compression.formats` says; other gradients travel as they are.
"""

# Annotations are not postponed here: DDP compares those of a hook with the classes it expects.

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators.backends.work import future_of
from renkei.communicators.channel import Channel, Pending
from renkei.communicators.cuda_streams import beside_computation
from renkei.communicators.sum_by_slices import coded_sum
from renkei.communicators.work_queue import WorkQueue
from renkei.errors import UsageError
from renkei.gradients.buckets import Bucket, Slot
from renkei.gradients.compression.codec import Codec
from renkei.gradients.compression.feedback import NAMES, Feedback
from renkei.gradients.compression.formats import Bf16, Fp16, Int8, PowerSgd, WireFormat
from renkei.gradients.compression.wire import give_along


class _HookedBucket:
    """One bucket of DDP's."""

    def __init__(self, wire_format: WireFormat, bucket: dist.GradBucket, numbers: Sequence[int]) -> None:
        buffer = bucket.buffer()
        self._offsets = [int(each.storage_offset() - buffer.storage_offset()) for each in bucket.gradients()]
        self._shapes = [each.shape for each in bucket.gradients()]
        places = zip(numbers, self._offsets, self._shapes, strict=True)
        slots = tuple(Slot(number, offset, int(shape.numel())) for number, offset, shape in places)
        self.wire = wire_format.wire_for(buffer.dtype, self._shapes)
        self.keeps_account = not wire_format.is_exact  # for this or for other buckets of the same step
        self.feedback = Feedback([Bucket("", slots, buffer.numel())], [self.wire], [buffer])

    def pieces(self, buffer: Tensor) -> list[Tensor]:
        """The gradients, flat."""
        return [
            buffer[offset : offset + shape.numel()] for offset, shape in zip(self._offsets, self._shapes, strict=True)
        ]


class State:
    """What the hooks need: a group of their own, and what is still owed to later steps.

    Creating one is a collective operation of the group. A step whose mean isn't finite leaves what was owed before it,
    for `GradScaler` skips it.

    Args:
        group: the ranks; all of them by default.
        grad_scaler: what scales the losses, if anything.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, grad_scaler: Any = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        own = dist.new_group(ranks, use_local_synchronization=True)
        self.rank, self.num_addends = own.rank(), own.size()
        self._grad_scaler = grad_scaler
        self._channel = Channel(own, rank=self.rank, size=self.num_addends)
        self._line = WorkQueue("compressed gradients")
        weakref.finalize(self, self._line.close)  # its thread would go on when nobody refers to this
        self._numbers: dict[Tensor, int] = {}  # of parameters, in the order in which they were seen first
        self._buckets: dict[tuple[int, ...], _HookedBucket] = {}
        self._left: dict[str, dict[int, Tensor]] = {name: {} for name in NAMES}  # by buckets there are no more
        self._loss_scale: float | None = None
        self._is_finite = True

    def state_dict(self) -> dict[str, Any]:
        """What this rank still owes, to be saved by each rank for itself between two steps."""
        self._end_of_step()
        for key in list(self._buckets):
            self._dissolve(key)
        left = {name: dict(known) for name, known in self._left.items()}
        return {"rank": self.rank, "size": self.num_addends, "loss_scale": self._loss_scale, **left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Owe what was owed then.

        Raises:
            UsageError: it was saved by another rank, or among another number of them.
        """
        saved, mine = (state_dict["rank"], state_dict["size"]), (self.rank, self.num_addends)
        if saved != mine:
            raise UsageError(f"the state of rank {saved[0]} of {saved[1]} is not for rank {mine[0]} of {mine[1]}")
        self._loss_scale, self._is_finite = state_dict["loss_scale"], True
        self._buckets.clear()
        self._left = {name: dict(state_dict[name]) for name in self._left}

    def start_mean(self, wire_format: WireFormat, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to replace a bucket by its mean over ranks."""
        if bucket.index() == 0:
            self._end_of_step()
        buffer = bucket.buffer()
        hooked = self._bucket_of(wire_format, bucket)
        if self._grad_scaler is not None:
            self._loss_scale = self._grad_scaler.get_scale()
            hooked.feedback.follow(self._loss_scale)

        def run() -> None:
            if buffer.dtype != torch.float32:  # these travel and are added as they are
                buffer.div_(self.num_addends)
            hooked.wire.start_sum(self, buffer, hooked.pieces(buffer)).wait()
            if buffer.dtype == torch.float32:
                buffer.div_(self.num_addends)
            if hooked.keeps_account:
                self._is_finite &= bool(buffer.isfinite().all())

        beside = beside_computation(run, buffer.device) if buffer.is_cuda else run
        return future_of(self._line.submit(beside), buffer)

    # -- what carries the sums (see `Carrier`) --------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Begin to replace a buffer by its sum over ranks."""
        return self._channel.start_reduction(buffer, "sum", "gradient bucket")

    def start_coded_sum(self, buffer: Tensor, codec: Codec, owed: Tensor | None) -> Pending:
        """Replace a buffer by its sum over ranks, which travels coded."""
        give_along(owed, buffer)
        coded_sum(self._channel, buffer, codec, owed, "coded gradient bucket")
        return Pending([])

    def start_sums(self, run: Callable[[Callable[[Tensor], None]], None], device: torch.device) -> Pending:
        """Do what takes several sums, one after the other."""
        run(lambda buffer: self._channel.start_reduction(buffer, "sum", "compressed gradient bucket").wait())
        return Pending([])

    # -- what is owed ---------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        for bucket in self._buckets.values():
            if self._is_finite:
                bucket.feedback.settle()
            else:
                bucket.feedback.forget()
        self._is_finite = True

    def _bucket_of(self, wire_format: WireFormat, bucket: dist.GradBucket) -> _HookedBucket:
        """What is remembered of a bucket. DDP makes other buckets of the same parameters after the first step."""
        numbers = tuple(self._numbers.setdefault(each, len(self._numbers)) for each in bucket.parameters())
        if numbers not in self._buckets:
            for key in [key for key in self._buckets if set(key) & set(numbers)]:
                self._dissolve(key)
            made = self._buckets[numbers] = _HookedBucket(wire_format, bucket, numbers)
            state: dict[str, Any] = {"loss_scale": self._loss_scale}
            for name, known in self._left.items():
                state[name] = {"settled": {at: known.pop(at) for at in numbers if at in known}}
            made.feedback.restore(state, {at: at for at in numbers})
        return self._buckets[numbers]

    def _dissolve(self, key: tuple[int, ...]) -> None:
        state = self._buckets.pop(key).feedback.state()
        for name, known in self._left.items():
            known |= state[name]["settled"] | state[name]["pending"]  # where both are, the later one


# -- the hooks ----------------------------------------------------------------------------------------------------


def mean_as(wire_format: WireFormat) -> Callable[[State, dist.GradBucket], torch.futures.Future[Tensor]]:
    """A hook for a format with settings of your own."""

    def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not isinstance(state, State):
            raise UsageError(f"the state of this hook is a {type(state).__name__}, but must be a renkei.hooks.State()")
        return state.start_mean(wire_format, bucket)

    return hook


def bf16_mean(state: State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Half the bytes, added in 32 bits."""
    return mean_as(Bf16())(state, bucket)


def fp16_mean(state: State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Half the bytes, added in 32 bits; nothing overflows."""
    return mean_as(Fp16())(state, bucket)


def int8_mean(state: State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A quarter of the bytes, with error feedback."""
    return mean_as(Int8())(state, bucket)


def power_sgd_mean(state: State, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Factors of rank 4, with error feedback."""
    return mean_as(PowerSgd())(state, bucket)
