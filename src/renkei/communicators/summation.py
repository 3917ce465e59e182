"""Adding what ranks bring: in one fixed order, 16-bit floats in 32 bits. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ADDED_IN_32_BITS = (torch.float16, torch.bfloat16)
_CACHE_LINE = 64  # bytes; two ranks that wrote to one line would take it from each other all the time


def slices(tensor: Tensor, num_slices: int) -> list[Tensor]:
    """A flat tensor cut in whole cache lines: equally long slices, but for the last ones, which may be empty."""
    line = max(1, _CACHE_LINE // tensor.element_size())
    length = -(-tensor.numel() // (num_slices * line)) * line
    return [tensor[at * length : (at + 1) * length] for at in range(num_slices)]


def add_in_tree(parts: Sequence[Tensor], combine: Callable[..., Tensor] = torch.add) -> Tensor:
    """Add tensors of one shape pairwise, ((0 + 1) + (2 + 3)) + ..., into the first, which is returned.

    The order depends on nothing but their number. The sum of each aligned group of 2, 4, 8 ... of them is computed on
    its own, so whoever holds such a group may add it beforehand without changing a bit of the result.

    Args:
        parts: those at even places are overwritten.
        combine: what to do instead of adding, with an argument `out`.
    """
    distance = 1
    while distance < len(parts):
        for at in range(0, len(parts) - distance, 2 * distance):
            combine(parts[at], parts[at + distance], out=parts[at])
        distance *= 2
    return parts[0]


def widened(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors if sums of their dtype are exact enough, else copies in 32 bits."""
    return [part.float() for part in parts] if parts[0].dtype in ADDED_IN_32_BITS else parts
