"""Whole numbers of 8 bits, with a scale for each block of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from renkei.gradients.compression.codec import BlockCodec, largest, some_at_a_time

_LARGEST = 127


@final
@dataclass(frozen=True)
class Int8Codec(BlockCodec):
    """The nearest of 255 equidistant values, as far apart as the largest of a block needs.

    A block with something in it that is not finite comes back as NaN, all of it.

    Args:
        block: how many values share a scale, which takes 4 bytes.
    """

    block: int = 256
    scaled: ClassVar[torch.dtype] = torch.int8

    def encode_rows(self, rows: Tensor, scales: Tensor, scaled: Tensor) -> None:
        """See `BlockCodec`."""
        most = largest(rows)
        torch.div(most, _LARGEST, out=scales)
        steps = _LARGEST / most
        # infinite where the block is zero, or nearly; what is not finite has a scale that isn't
        steps.masked_fill_(~(steps.isfinite() & most.isfinite()), 0.0)
        for some, its_steps, result in some_at_a_time(rows, steps, scaled):
            result.copy_((some * its_steps).round_())

    def decode_rows(self, scaled: Tensor, scales: Tensor, rows: Tensor) -> None:
        """See `BlockCodec`."""
        rows.copy_(scaled)
        # a NaN beside the scale, for 0 x inf is one already, but any other number x inf is not
        rows.mul_(torch.where(scales.isfinite(), scales, torch.nan))
