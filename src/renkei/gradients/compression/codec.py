"""How floats travel in fewer bytes than they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

_SCALE = 4  # bytes
_TEMPORARY = 2**16  # values


class Codec(ABC):
    """Turns floats into bytes and back, losing something, the same on every rank.

    What is not finite stays so: if any value is infinite or NaN, so is some value of what comes back, at its place at
    least.
    """

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """How many bytes so many values take."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """The bytes of a flat tensor of floats."""

    @abstractmethod
    def decode_into(self, values: Tensor, data: Tensor) -> None:
        """Fill a flat fp32 tensor with the values that bytes stand for."""

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """So many values, in fp32."""
        values = data.new_empty(numel, dtype=torch.float32)
        self.decode_into(values, data)
        return values

    def room_for(self, values: Tensor) -> Tensor:
        """Memory for as many bytes as they take."""
        return values.new_empty(self.num_bytes(values.numel()), dtype=torch.uint8)


class BlockCodec(Codec):
    """A scale, in fp32, for each block of values. The scales come first, and then what they scale.

    What is computed is computed in place, or some rows at a time: large temporaries cost more than the arithmetic, for
    the memory of each is given back and has to be got again, page by page.

    Attributes:
        block: how many values share a scale.
        scaled: what values become.
    """

    block: int
    scaled: ClassVar[torch.dtype]

    @abstractmethod
    def encode_rows(self, rows: Tensor, scales: Tensor, scaled: Tensor) -> None:
        """From fp32 blocks [n, k], of which k is `block` or fewer, fill scales [n, 1] and what they scale [n, k]."""

    @abstractmethod
    def decode_rows(self, scaled: Tensor, scales: Tensor, rows: Tensor) -> None:
        """The inverse: fill `rows`."""

    def num_bytes(self, numel: int) -> int:
        """See `Codec`."""
        return self.scaled.itemsize * numel + _SCALE * self._num_blocks(numel)

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        data = self.room_for(values)
        for part in self._parts(values.float(), data):
            self.encode_rows(*part)
        return data

    def decode_into(self, values: Tensor, data: Tensor) -> None:
        """See `Codec`."""
        for rows, scales, scaled in self._parts(values, data if data.storage_offset() % _SCALE == 0 else data.clone()):
            self.decode_rows(scaled, scales, rows)

    def _parts(self, values: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views: whole blocks, their scales, and what they scale; and then likewise of what is left, a shorter one."""
        cut = _SCALE * self._num_blocks(values.numel())
        scales, scaled = data[:cut].view(torch.float32).view(-1, 1), data[cut:].view(self.scaled)
        num_whole = values.numel() // self.block
        whole = num_whole * self.block
        if whole:
            rows = values[:whole].view(num_whole, self.block)
            yield rows, scales[:num_whole], scaled[:whole].view(num_whole, self.block)
        if whole < values.numel():
            yield values[whole:].view(1, -1), scales[num_whole:], scaled[whole:].view(1, -1)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)


def some_at_a_time(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equally many rows, cut alike, so that a temporary of the first one's size fits into a cache."""
    number = rows[0].shape[0] if rows[0].is_cuda else max(1, _TEMPORARY // rows[0].shape[1])
    return zip(*(each.split(number) for each in rows), strict=True)


def largest(rows: Tensor) -> Tensor:
    """The largest absolute value of each row [n, k], [n, 1]; NaN where there is one."""
    return torch.maximum(rows.amax(dim=1, keepdim=True), -rows.amin(dim=1, keepdim=True))
