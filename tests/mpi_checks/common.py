"""What the checks of the backend "mpi-renkei" are made of; they run over the default group."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from contract.values import numbers
from renkei.communicators.backends.process_group import TransportGroup

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add, "mean": operator.add, "product": operator.mul, "min": torch.minimum, "max": torch.maximum,
    "band": operator.and_, "bor": operator.or_, "bxor": operator.xor,
}  # fmt: skip


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def others() -> list[int]:
    return [other for other in range(size()) if other != rank()]


def default_group() -> TransportGroup:
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, TransportGroup)
    return group


@contextmanager
def moving(**num_bytes: int) -> Iterator[None]:
    """So many bytes of this rank's tensors go through our transport meanwhile, by operation, and no others."""
    before = default_group().bytes_moved.copy()
    yield
    moved = default_group().bytes_moved - before
    assert dict(moved) == num_bytes


def reduced(dtype: torch.dtype, reduction: str, numel: int) -> Tensor:
    """What must come of every rank's `numbers`: computed in a dtype in which nothing is rounded or overflows."""
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    if dtype == torch.bool:
        wide, reduction = torch.bool, {"sum": "bor", "product": "band"}.get(reduction, reduction)
    parts = [numbers(each, (numel,), dtype).to(wide) for each in range(size())]
    total = functools.reduce(COMBINE[reduction], parts)
    return (total / size() if reduction == "mean" else total).to(dtype)


@contextmanager
def in_chunks(num_bytes: int) -> Iterator[None]:
    """MPI gets to count no more bytes than that one by one."""
    transport: Any = default_group().transport
    transport._find_way.cache_clear()
    with mock.patch.object(transport._memory, "chunk", num_bytes), mock.patch.object(transport._memory, "_types", {}):
        yield
    transport._find_way.cache_clear()
