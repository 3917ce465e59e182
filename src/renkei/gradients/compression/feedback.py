"""What the wires of one plan remember from step to step, by parameter: plans come and go, it stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from renkei.gradients.buckets import Bucket
from renkei.gradients.compression.tentative import Tentative
from renkei.gradients.compression.wire import Wire


class Feedback:
    """The account of what was lost on the way (error feedback), and where power iterations go on.

    Args:
        plan: the buckets.
        wires: for each bucket, what carries it.
        buffers: for each bucket, a tensor of its length and on its device.
    """

    def __init__(self, plan: Sequence[Bucket], wires: Sequence[Wire], buffers: Sequence[Tensor]) -> None:
        self._plan, self._wires, self._buffers = plan, wires, buffers
        self._loss_scale: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to remember."""
        return any(True for _ in self._tentatives())

    def settle(self) -> None:
        """The step was made: what was lost in it is owed from now on."""
        for each in self._tentatives():
            each.settle()

    def forget(self) -> None:
        """The step was skipped: what was owed before it still is."""
        for each in self._tentatives():
            each.forget()

    def reweigh(self, factor: float) -> None:
        """The sums of the last exchange were multiplied by a factor: what was owed before it, and was in them, too."""
        for wire in self._wires:
            if wire.owed is not None:
                wire.owed.reweigh(factor)

    def follow(self, loss_scale: float) -> None:
        """The gradients that come now are of a loss multiplied by that: what is owed of earlier ones has to be, too."""
        if self._loss_scale not in (None, loss_scale):
            for wire in self._wires:
                if wire.owed is not None:
                    wire.owed.scale(loss_scale / self._loss_scale)
        self._loss_scale = loss_scale

    def state(self) -> dict[str, Any]:
        """What is remembered, by parameter, for `restore`, as if a step was made with what is late; copies."""
        owed: dict[int, Tensor] = {}
        factors: dict[int, Tensor] = {}
        for bucket, wire in zip(self._plan, self._wires, strict=True):
            if wire.owed is not None and wire.owed.latest is not None:
                for slot in bucket.slots:
                    owed[slot.parameter] = wire.owed.latest[slot.offset : slot.offset + slot.numel].clone()
            if wire.factors is not None and wire.factors.latest is not None:
                parts = wire.factors.latest.split(wire.factor_sizes)
                factors |= {slot.parameter: part.clone() for slot, part in zip(bucket.slots, parts, strict=True)}
        return {"owed": owed, "factors": factors, "loss_scale": self._loss_scale}

    def restore(self, state: Mapping[str, Any], numbers: Sequence[int | None]) -> None:
        """Remember what `state` told, be it under another plan, or of other parameters.

        Args:
            numbers: by parameter then, its number now, if it is still there.
        """
        self._loss_scale = state["loss_scale"]
        owed, factors = (
            {now: tensor for then, tensor in state[name].items() if (now := numbers[then]) is not None}
            for name in ("owed", "factors")
        )
        for bucket, wire, buffer in zip(self._plan, self._wires, self._buffers, strict=True):
            known = [slot for slot in bucket.slots if slot.parameter in owed]
            if wire.owed is not None and known:
                wire.owed.settled = torch.zeros_like(buffer)
                for slot in known:
                    wire.owed.settled[slot.offset : slot.offset + slot.numel].copy_(owed[slot.parameter])
            if wire.factors is not None and all(at in factors for at in bucket.parameters):
                wire.factors.settled = torch.cat([factors[at].to(buffer.device) for at in bucket.parameters])

    def _tentatives(self) -> Iterator[Tentative]:
        for wire in self._wires:
            yield from (each for each in (wire.owed, wire.factors) if each is not None)
