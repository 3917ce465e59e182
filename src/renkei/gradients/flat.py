"""Gradients in flat buffers: each parameter's gradient has a place in a bucket, and ``.grad`` can be a view of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from renkei.gradients.buckets import Bucket, GradientSize

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def size_of(parameter: Tensor, *, keeps_32_bits: bool = True) -> GradientSize:
    """What bucket planning needs to know of a parameter's gradient.

    Args:
        keeps_32_bits: whether 32-bit floats travel as they are.
    """
    kind = f"{parameter.device}/{str(parameter.dtype).removeprefix('torch.')}"
    is_exact = parameter.dtype == torch.float64 or (parameter.dtype == torch.float32 and keeps_32_bits)
    return GradientSize(parameter.numel(), parameter.element_size(), kind, is_exact)


class FlatGradients:
    """The buffers of a bucket plan, allocated once, and the way of gradients into and out of them.

    Attributes:
        buffers: one flat tensor for each bucket.
        pieces: for each bucket, flat views of what it consists of: its gradients and, in the last one, the tail.
    """

    def __init__(self, parameters: Sequence[Parameter], plan: Sequence[Bucket], allocate: Allocate) -> None:
        self._parameters = parameters
        self._plan = plan
        self.buffers = [_allocate(bucket, allocate) for bucket in plan]
        self.pieces = [_cut(bucket, buffer) for bucket, buffer in zip(plan, self.buffers, strict=True)]
        self._places = [torch.empty(0)] * len(parameters)
        for bucket, buffer in zip(plan, self.buffers, strict=True):
            for slot in bucket.slots:
                self._places[slot.parameter] = _view_like(parameters[slot.parameter], buffer, slot.offset)

    @property
    def tail(self) -> Tensor:
        """The last elements of the last buffer."""
        return self.pieces[-1][-1]

    def holds(self, gradient: Tensor) -> bool:
        """Whether a gradient lies in a buffer."""
        begin = gradient.untyped_storage().data_ptr()
        return any(begin == buffer.untyped_storage().data_ptr() for buffer in self.buffers)

    def pack(self, at: int, scale: Tensor) -> None:
        """Put ``scale x .grad`` in its place, in one pass over memory, and let ``.grad`` be that place."""
        gradient = self._parameters[at].grad
        assert gradient is not None
        if gradient.requires_grad:  # create_graph=True
            gradient = gradient.detach()
        torch.mul(gradient, scale, out=self._places[at])
        self.hand_out(at)

    def clear(self, at: int) -> None:
        """Put zeros in the place of a gradient there isn't."""
        self._places[at].zero_()

    def hand_out(self, at: int) -> None:
        """Let ``.grad`` be what the buffer holds.

        It is a new view each time, for ``module.half()`` and the like re-point the data of whatever tensor it is.
        """
        self._parameters[at].grad = self.view(at)

    def view(self, at: int) -> Tensor:
        """A new view of a gradient's place."""
        return self._places[at].detach()

    def scale(self, factor: float) -> None:
        """Multiply all gradients in the buffers."""
        for bucket, buffer in zip(self._plan, self.buffers, strict=True):
            buffer[: bucket.body].mul_(factor)


def _allocate(bucket: Bucket, allocate: Allocate) -> Tensor:
    device, dtype = bucket.kind.rsplit("/", 1)
    return allocate(bucket.numel, getattr(torch, dtype), torch.device(device))


def _cut(bucket: Bucket, buffer: Tensor) -> list[Tensor]:
    gradients = [buffer[slot.offset : slot.offset + slot.numel] for slot in bucket.slots]
    return [*gradients, buffer[bucket.body :]] if bucket.tail else gradients


def _view_like(parameter: Tensor, buffer: Tensor, offset: int) -> Tensor:
    """A view with the parameter's own strides where they are dense (channels_last is), contiguous otherwise."""
    strides = torch.empty_like(parameter, device="meta").stride()  # keeps them exactly if they are dense
    return buffer.as_strided(parameter.shape, strides, buffer.storage_offset() + offset)
