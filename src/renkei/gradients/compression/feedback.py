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

    def undo(self) -> None:
        """The last exchange was for nothing."""
        for each in self._tentatives():
            each.undo()

    def leave(self, parameter: int) -> None:
        """In the last exchange no rank had a gradient of this parameter, so nothing is made of what was owed of it."""
        for bucket, wire in zip(self._plan, self._wires, strict=True):
            for slot in bucket.slots if wire.owed is not None else ():
                if slot.parameter == parameter:
                    assert wire.owed is not None
                    wire.owed.leave(slot.offset, slot.offset + slot.numel)

    def absorb(self, other: Feedback) -> None:
        """Owe what another account of the same plan owes, too, which owes nothing then."""
        for wire, its in zip(self._wires, other._wires, strict=True):
            if wire.owed is not None and its.owed is not None and its.owed.settled is not None:
                owed = its.owed.settled * ((self._loss_scale or 1.0) / (other._loss_scale or 1.0))
                wire.owed.settled = owed if wire.owed.settled is None else wire.owed.settled + owed
                its.owed.settled = None

    def clear(self) -> None:
        """Remember nothing."""
        for each in self._tentatives():
            each.settled = None
            each.forget()
        self._loss_scale = None

    def state(self) -> dict[str, Any]:
        """What is remembered, by parameter, for `restore`; copies. It owes nothing yet of a step that isn't made."""
        found: dict[str, Any] = {"loss_scale": self._loss_scale}
        for when in ("settled", "pending"):
            owed: dict[int, Tensor] = {}
            factors: dict[int, Tensor] = {}
            for bucket, wire in zip(self._plan, self._wires, strict=True):
                sizes = [slot.numel for slot in bucket.slots]
                for kept, cut, into in ((wire.owed, sizes, owed), (wire.factors, wire.factor_sizes, factors)):
                    whole: Tensor | None = None if kept is None else getattr(kept, when)
                    if whole is None:
                        continue
                    begins = [slot.offset for slot in bucket.slots] if into is owed else _begins(cut)
                    for slot, begin, numel in zip(bucket.slots, begins, cut, strict=True):
                        into[slot.parameter] = whole[begin : begin + numel].clone()
            found[when] = {"owed": owed, "factors": factors}
        return found

    def restore(self, state: Mapping[str, Any], numbers: Mapping[int, int]) -> None:
        """Remember what `state` told, be it under another plan, or of other parameters, and nothing else.

        Args:
            numbers: by parameter then, its number now, of those that are still there; the others' is forgotten.
        """
        self.clear()
        self._loss_scale = state["loss_scale"]
        for when in ("settled", "pending"):
            owed, factors = (
                {numbers[then]: tensor for then, tensor in state[when][name].items() if then in numbers}
                for name in ("owed", "factors")
            )
            for bucket, wire, buffer in zip(self._plan, self._wires, self._buffers, strict=True):
                known = [slot for slot in bucket.slots if slot.parameter in owed]
                if wire.owed is not None and known:
                    whole = torch.zeros_like(buffer)
                    for slot in known:
                        whole[slot.offset : slot.offset + slot.numel].copy_(owed[slot.parameter])
                    setattr(wire.owed, when, whole)
                if wire.factors is not None and bucket.slots and all(at in factors for at in bucket.parameters):
                    parts = [factors[at].to(buffer.device) for at in bucket.parameters]
                    setattr(wire.factors, when, torch.cat(parts))

    def _tentatives(self) -> Iterator[Tentative]:
        for wire in self._wires:
            yield from (each for each in (wire.owed, wire.factors) if each is not None)


def _begins(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes))]
