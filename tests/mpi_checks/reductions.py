"""Reductions of every dtype, against what one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contract.values import COMPLEX, FLOATS, INTEGERS, assert_same, numbers
from mpi_checks.common import default_group, moving, rank, reduced, size
from renkei.communicators.reduction import Reduction
from renkei.errors import UsageError

NUMEL = 1009
REDUCTIONS: dict[Reduction, Any] = {
    "sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip
ORDERED = [*FLOATS, *[dtype for dtype in INTEGERS if dtype != torch.bool]]
DEFINED: dict[Reduction, Sequence[torch.dtype]] = {
    "sum": [*FLOATS, *COMPLEX, *INTEGERS], "mean": [*FLOATS, *COMPLEX], "min": [*ORDERED, torch.bool],
    "product": [*FLOATS, torch.complex64, torch.complex128, *INTEGERS], "max": [*ORDERED, torch.bool],
    "band": INTEGERS, "bor": INTEGERS, "bxor": INTEGERS,
}  # fmt: skip


def check_every_reduction_of_every_dtype() -> None:
    for reduction, dtypes in DEFINED.items():
        for dtype in dtypes:
            for numel in (NUMEL, 1, 0):
                tensor = numbers(rank(), (numel,), dtype)
                with moving(**({"allreduce": numel * dtype.itemsize} if numel else {})):
                    default_group().start_reduction([tensor], reduction).wait()
                assert_same(tensor, reduced(dtype, reduction, numel))


def check_every_reduce_scatter_of_every_dtype() -> None:
    for reduction, dtypes in DEFINED.items():
        for dtype in dtypes:
            for numel in (101, 1, 0):
                whole = reduced(dtype, reduction, size() * numel)
                output, options = torch.empty(numel, dtype=dtype), dist.ReduceScatterOptions()
                options.reduceOp = REDUCTIONS[reduction]
                tensor = numbers(rank(), (size() * numel,), dtype)
                default_group().reduce_scatter_single(output, tensor, options).wait()
                assert_same(output, whole.view(size(), numel)[rank()])


def check_undefined_reductions_are_refused_and_harm_nothing() -> None:
    undefined: list[tuple[torch.dtype, Reduction]]
    undefined = [(dtype, "mean") for dtype in INTEGERS] + [(dtype, "bor") for dtype in [*FLOATS, *COMPLEX]]
    undefined += [(dtype, "min") for dtype in COMPLEX] + [(torch.complex32, "product"), (torch.float8_e4m3fn, "sum")]
    for dtype, reduction in undefined:
        with pytest.raises(UsageError, match=str(dtype)):
            default_group().start_reduction([torch.zeros(3, dtype=dtype)], reduction).wait()
    check_16_bits_are_added_in_32()


def check_16_bits_are_added_in_32() -> None:
    """2048 + 1 is 2048 in 16 bits; and a sum may overflow there where the mean doesn't."""
    for dtype, large in ((torch.float16, 2048), (torch.bfloat16, 256)):
        numel = NUMEL if size() > 2 else 0
        tensor = torch.full((NUMEL,), large if rank() == 0 else 1, dtype=dtype)
        output = torch.empty(NUMEL, dtype=dtype)
        dist.reduce_scatter_tensor(output, tensor.repeat(size()))
        dist.all_reduce(tensor)
        assert_same(tensor[:numel], torch.full((numel,), large + size() - 1, dtype=dtype))
        assert_same(output, tensor)
    tensor = torch.full((NUMEL,), 40000 + 32 * rank(), dtype=torch.float16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert_same(tensor, torch.full((NUMEL,), 40000 + 16 * (size() - 1), dtype=torch.float16))


def check_other_ways_to_reduce() -> None:
    tensor = numbers(rank())
    dist.reduce(tensor, dst=size() - 1)
    assert_same(tensor, reduced(torch.float32, "sum", 37) if rank() == size() - 1 else numbers(rank()))
    several = [numbers(rank(), (3, 5)), numbers(rank(), (11,))]
    dist.all_reduce_coalesced(several)
    assert_same(several[0], reduced(torch.float32, "sum", 15).view(3, 5))
    assert_same(several[1], reduced(torch.float32, "sum", 11))
    uneven = [numbers(rank(), (5 + each,)) for each in range(size())]
    output = torch.empty(5 + rank())
    dist.reduce_scatter(output, uneven)
    assert_same(output, reduced(torch.float32, "sum", 5 + rank()))
