"""Whole numbers of 8 bits, with a scale for each block of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from renkei.gradients.compression.codec import Codec, in_blocks, join, take_apart

_LARGEST = 127


@final
@dataclass(frozen=True)
class Int8Codec(Codec):
    """The nearest of 255 equidistant values, as far apart as the largest of a block needs.

    A block with something in it that is not finite comes back as NaN, all of it.

    Args:
        block: how many values share a scale, which takes 4 bytes.
    """

    block: int = 256

    def num_bytes(self, numel: int) -> int:
        """See `Codec`."""
        return numel + 4 * -(-numel // self.block)

    def encode(self, values: Tensor) -> Tensor:
        """See `Codec`."""
        rows = in_blocks(values, self.block)
        scales = rows.abs().amax(dim=1, keepdim=True) / _LARGEST
        # 0/0 and inf/inf are NaN; x/0, where the scale was too small for a float, is infinite
        steps = (rows / scales).nan_to_num_(0.0, _LARGEST, -_LARGEST).round_().to(torch.int8)
        return join(scales, steps.view(-1)[: values.numel()])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """See `Codec`."""
        scales, steps = take_apart(data, -(-numel // self.block), torch.int8)
        rows = in_blocks(steps, self.block)
        # a NaN beside the scale, for 0 x inf is one already, but any other number x inf is not
        return (rows * torch.where(scales.isfinite(), scales, torch.nan).view(-1, 1)).view(-1)[:numel]
