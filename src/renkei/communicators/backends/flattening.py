"""Tensors as what a transport moves: elements, or bytes, in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def flatten(tensor: Tensor, *, own: bool, on_host: bool) -> Tensor:
    """The elements in a row: in the tensor's memory if they are so there, unless a copy of its `own` is asked for.

    Args:
        on_host: what is on a GPU is copied to the host.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cuda and on_host:
        return tensor.contiguous().view(-1).cpu()
    return tensor.clone(memory_format=torch.contiguous_format).view(-1) if own else tensor.contiguous().view(-1)


def as_bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes."""
    return (flat if flat.numel() else flat.new_empty(0)).view(torch.uint8)


def num_bytes(tensor: Tensor) -> int:
    """How many bytes its elements take."""
    return tensor.numel() * tensor.element_size()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same address."""
    return one.data_ptr() == other.data_ptr()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may overlap."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def put_back(flat: Tensor, tensor: Tensor) -> None:
    """Give a tensor the elements of its flattened form, unless they are in its memory already."""
    if not is_same_memory(flat, tensor):
        tensor.detach().copy_(flat.view(tensor.shape))


def split_sizes(whole: Tensor, rows: Sequence[int], num_ranks: int) -> list[int]:
    """How many bytes each rank's rows of a tensor take; no rows means equal parts."""
    if not rows:
        return [num_bytes(whole) // num_ranks] * num_ranks
    row = num_bytes(whole) // max(1, whole.shape[0])
    return [count * row for count in rows]


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """The tensors in a list of lists."""
    if isinstance(nested, Tensor):
        yield nested
    else:
        for each in nested:
            yield from tensors_in(each)
