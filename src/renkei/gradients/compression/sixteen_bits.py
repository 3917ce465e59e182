"""Floats of 16 bits: bf16 has the range of fp32 and 8 bits of precision, fp16 has 11 bits and needs a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from renkei.gradients.compression.codec import Codec, in_blocks, join, take_apart

_TOP = 15  # as a power of two: just below the next one values would be rounded to infinity


@final
@dataclass(frozen=True)
class Bf16Codec(Codec):
    """Rounded to bf16, to the nearest."""

    def num_bytes(self, numel: int) -> int:
        """See `Codec`."""
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        return values.bfloat16().view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """See `Codec`."""
        return data.view(torch.bfloat16).float()


@final
@dataclass(frozen=True)
class Fp16Codec(Codec):
    """Rounded to fp16 after each block was multiplied by the power of two that brings its largest value near the top.

    So nothing overflows, however large gradients are, and the small ones keep as many bits as there are.

    Args:
        block: how many values share a scale, which takes 4 bytes.
    """

    block: int = 4096

    def num_bytes(self, numel: int) -> int:
        """See `Codec`."""
        return 2 * numel + 4 * -(-numel // self.block)

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        rows = in_blocks(values, self.block)
        scales = _powers_to_the_top(rows.abs().amax(dim=1, keepdim=True))
        return join(scales, (rows * scales).half().view(-1)[: values.numel()])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """See `Codec`."""
        scales, scaled = take_apart(data, -(-numel // self.block), torch.float16)
        return (in_blocks(scaled, self.block) / scales.view(-1, 1)).view(-1)[:numel]


def _powers_to_the_top(largest: Tensor) -> Tensor:
    """By block what to multiply by, exactly; 1 where there is nothing to be gained: nothing but zeros, or no number."""
    _, exponent = torch.frexp(largest)
    powers = torch.ldexp(torch.ones_like(largest), (_TOP - exponent).clamp(-126, 126))
    return torch.where(largest.isfinite() & (largest > 0), powers, 1.0)
