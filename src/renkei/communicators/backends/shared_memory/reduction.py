"""Reducing tensors that all ranks can reach. Arithmetic only: which rank writes what follows from its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from renkei.communicators.backends.transport import Reduction
from renkei.communicators.summation import add_in_tree, widened

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add, "mean": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


def reduce_in_chunks(parts: Sequence[Tensor], results: Sequence[Tensor], reduction: Reduction, chunk: int) -> None:
    """Fill all `results` with the reduction of `parts`, which may be among them, and are overwritten.

    Args:
        chunk: bytes that are done at a time, so that what has been read is still in the cache when it is written.
    """
    length = max(1, chunk // parts[0].element_size())
    pieces = zip(*(each.split(length) for each in (*parts, *results)), strict=True)
    for piece in pieces:
        total = _reduce(piece[: len(parts)], reduction)
        for result in piece[len(parts) :]:
            if result.data_ptr() != total.data_ptr():
                result.copy_(total)


def reduce_to(result: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Fill `result` with the reduction of `parts`, which are left as they are."""
    first, *rest = parts
    if len(parts) == 2 and widened(parts) is parts and reduction != "mean":
        _COMBINE[reduction](first, rest[0], out=result)
        return
    result.copy_(_reduce([part.clone() for part in parts], reduction))


def _reduce(parts: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """The reduction; `parts` are overwritten."""
    total = add_in_tree(widened(parts), _COMBINE[reduction])
    return total.div_(len(parts)) if reduction == "mean" else total
