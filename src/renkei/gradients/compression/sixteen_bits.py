"""Floats of 16 bits: bf16 has the range of fp32 and 8 bits of precision, fp16 has 11 bits and needs a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from renkei.gradients.compression.codec import BlockCodec, Codec, largest, some_at_a_time

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

    def decode_into(self, values: Tensor, data: Tensor) -> None:
        """See `Codec`."""
        values.copy_(data.view(torch.bfloat16))


@final
@dataclass(frozen=True)
class Fp16Codec(BlockCodec):
    """Rounded to fp16 after each block was multiplied by the power of two that brings its largest value near the top.

    So nothing overflows, however large gradients are, and the small ones keep as many bits as there are.

    Args:
        block: how many values share a scale, which takes 4 bytes.
    """

    block: int = 4096
    scaled: ClassVar[torch.dtype] = torch.float16

    def encode_rows(self, rows: Tensor, scales: Tensor, scaled: Tensor) -> None:
        """See `BlockCodec`."""
        scales.copy_(_powers_to_the_top(largest(rows)))
        for some, its_scales, result in some_at_a_time(rows, scales, scaled):
            result.copy_(some * its_scales)

    def decode_rows(self, scaled: Tensor, scales: Tensor, rows: Tensor) -> None:
        """See `BlockCodec`."""
        rows.copy_(scaled)
        rows.div_(scales)


def _powers_to_the_top(most: Tensor) -> Tensor:
    """By block what to multiply by, exactly; 1 where there is nothing to be gained: nothing but zeros, or no number."""
    _, exponent = torch.frexp(most)
    powers = torch.ldexp(torch.ones_like(most), (_TOP - exponent).clamp(-126, 126))
    return torch.where(most.isfinite() & (most > 0), powers, 1.0)
