"""What travels in a sum by slices: the values as they lie there, or fewer bytes."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor

from renkei.communicators.summation import slices
from renkei.gradients.compression.codec import Codec


class Coding(Protocol):
    """How flat tensors become messages and back."""

    def cut(self, tensor: Tensor, begin: int, num_slices: int) -> list[Part]:
        """The slices of a piece of the whole, which begins at such an element."""


class Part(Protocol):
    """One slice.

    Attributes:
        values: of the tensor; changed in place.
    """

    values: Tensor

    def give(self) -> Tensor:
        """What to send to the rank that adds this slice."""

    def give_sum(self) -> Tensor:
        """What to send to all once `values` are the sum; they become what the others read from that."""

    def room(self) -> Tensor:
        """Memory for what another rank gives."""

    def read(self, data: Tensor) -> Tensor:
        """The values of what another rank gave; `data` is overwritten later on."""

    def room_for_sum(self) -> Tensor:
        """Memory for the sum, as it is sent."""

    def take_sum(self, data: Tensor) -> None:
        """Let `values` be the sum."""


@final
class AsTheyAre:
    """Values travel as they are; sums come to where they belong."""

    def cut(self, tensor: Tensor, begin: int, num_slices: int) -> list[Part]:
        """See `Coding`."""
        return [_PlainPart(values) for values in slices(tensor, num_slices)]


class _PlainPart:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def give(self) -> Tensor:
        return self.values

    def give_sum(self) -> Tensor:
        return self.values

    def room(self) -> Tensor:
        return torch.empty_like(self.values)

    def read(self, data: Tensor) -> Tensor:
        return data

    def room_for_sum(self) -> Tensor:
        return self.values

    def take_sum(self, data: Tensor) -> None:
        """It came to where it belongs."""


@final
class Coded:
    """Values travel as a codec says. What that loses is kept.

    Args:
        codec: the same on all ranks.
        owed: fp32, as long as the whole tensor; where a slice was sent, it becomes what the others didn't get of it.
    """

    def __init__(self, codec: Codec, owed: Tensor | None) -> None:
        self._codec, self._owed = codec, owed

    def cut(self, tensor: Tensor, begin: int, num_slices: int) -> list[Part]:
        """See `Coding`."""
        values = slices(tensor, num_slices)
        if self._owed is None:
            return [_CodedPart(each, self._codec, None) for each in values]
        owed, at = [], begin
        for each in values:
            owed.append(self._owed[at : at + each.numel()])
            at += each.numel()
        return [_CodedPart(each, self._codec, its) for each, its in zip(values, owed, strict=True)]


class _CodedPart:
    def __init__(self, values: Tensor, codec: Codec, owed: Tensor | None) -> None:
        self.values, self._codec, self._owed = values, codec, owed

    def give(self) -> Tensor:
        data = self._codec.encode(self.values)
        self._owe(data)
        return data

    def give_sum(self) -> Tensor:
        data = self._codec.encode(self.values)
        self._owe(data)
        self._codec.decode_into(self.values, data)
        return data

    def _owe(self, data: Tensor) -> None:
        if self._owed is not None:
            self._codec.decode_into(self._owed, data)
            torch.sub(self.values, self._owed, out=self._owed)

    def room(self) -> Tensor:
        return self._codec.room_for(self.values)

    def read(self, data: Tensor) -> Tensor:
        return self._codec.decode(data, self.values.numel())

    def room_for_sum(self) -> Tensor:
        return self._codec.room_for(self.values)

    def take_sum(self, data: Tensor) -> None:
        self._codec.decode_into(self.values, data)
