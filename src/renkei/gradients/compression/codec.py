"""How floats travel in fewer bytes than they take."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


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
    def decode(self, data: Tensor, numel: int) -> Tensor:
        """So many values, in fp32."""

    def room_for(self, values: Tensor) -> Tensor:
        """Memory for as many bytes as they take."""
        return values.new_empty(self.num_bytes(values.numel()), dtype=torch.uint8)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """A flat tensor as rows of `block` fp32 values, the last one filled up with zeros."""
    num_blocks = -(-values.numel() // block)
    if values.numel() == num_blocks * block:
        return values.float().view(num_blocks, block)
    rows = values.new_zeros(num_blocks, block, dtype=torch.float32)
    rows.view(-1)[: values.numel()].copy_(values)
    return rows


def join(scales: Tensor, payload: Tensor) -> Tensor:
    """Scales, and then what they scale, as bytes."""
    return torch.cat([scales.reshape(-1).view(torch.uint8), payload.reshape(-1).view(torch.uint8)])


def take_apart(data: Tensor, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scales, one for each block, and what they scale, of such a dtype."""
    if data.storage_offset() % 4:
        data = data.clone()
    scales = 4 * num_blocks
    return data[:scales].view(torch.float32), data[scales:].view(dtype)
