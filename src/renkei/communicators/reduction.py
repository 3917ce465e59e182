"""Reducing what ranks bring, in one fixed tree, 16-bit floats in 32 bits and rounded once. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from renkei.communicators.summation import add_in_tree, widened

Reduction = Literal["sum", "mean", "product", "min", "max", "band", "bor", "bxor"]

CHUNK = 2**19  # bytes that are reduced at a time, of each rank's; they stay in the processor's own cache

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add, "mean": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


def reduce_in_chunks(
    parts: Sequence[Tensor], results: Sequence[Tensor], reduction: Reduction = "sum", chunk: int = CHUNK
) -> None:
    """Fill all `results` with the reduction of `parts`, which may be among them, and are overwritten.

    Args:
        chunk: bytes that are done at a time, so that what has been read is still in the cache when it is written; on a
            GPU all are.
    """
    length = max(1, parts[0].numel() if parts[0].is_cuda else chunk // parts[0].element_size())
    pieces = zip(*(each.split(length) for each in (*parts, *results)), strict=True)
    for piece in pieces:
        total = _reduce(piece[: len(parts)], reduction)
        for result in piece[len(parts) :]:
            if result.data_ptr() != total.data_ptr():
                result.copy_(total)


def reduce_to(result: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Fill `result` with the reduction of `parts`, which are left as they are."""
    if len(parts) == 2 and reduction != "mean":
        _COMBINE[reduction](*parts, out=result)
    else:
        result.copy_(_reduce([part.clone() for part in parts], reduction))


def _reduce(parts: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """The reduction; `parts` may be overwritten."""
    if len(parts) > 2 or reduction == "mean":  # two are combined in 32 bits and rounded once by torch itself
        parts = widened(parts)
    total = add_in_tree(parts, _COMBINE[reduction])
    return total.div_(len(parts)) if reduction == "mean" else total
