"""Checks of what adds tensors: all_reduce, reduce_scatter, and start_sum, by which gradients travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from contract.values import LAYOUTS, Unchanged, assert_same, numbers, shapes_for
from renkei.communicators.communicator import Communicator
from renkei.communicators.requested import TWO_LEVEL
from renkei.gradients.compression.codec import Codec
from renkei.gradients.compression.int8 import Int8Codec
from renkei.gradients.compression.sixteen_bits import Bf16Codec, Fp16Codec


def expected_reduction(size: int, shape: Sequence[int], dtype: torch.dtype, reduction: str) -> Tensor:
    """What `values.numbers` of all ranks come to, by formula."""
    element = torch.arange(math.prod(shape), dtype=torch.float64).reshape(tuple(shape)) % 7
    if dtype == torch.bool:
        odd = element % 2 == 1
        first, second = odd, ~odd if size > 1 else odd  # rank 1 brings the opposite of rank 0
        return first & second if reduction in ("product", "min") else first | second
    mean = element + (size - 1) / 2
    result = {
        "sum": size * mean,
        "mean": mean,
        "max": element + size - 1,
        "min": element,
        "product": math.prod((element + rank for rank in range(1, size)), start=element),
    }[reduction]
    if dtype.is_complex:
        return torch.complex(result, -result).to(dtype)
    return result.to(dtype) if dtype.is_floating_point else result.to(torch.int64).to(dtype)  # wraps around


def reductions_of(dtype: torch.dtype) -> list[str]:
    """What can be computed of a dtype: torch has neither an order for complex numbers nor a mean for integers."""
    if dtype.is_complex:
        return ["sum", "mean"]
    if dtype.is_floating_point:
        return ["sum", "mean", "product", "max", "min"]
    if dtype == torch.uint64:
        return ["sum", "product"]
    return ["sum", "product", "max", "min"]


def check_dtype(comm: Communicator, dtype: torch.dtype) -> None:
    """Every reduction that torch has for a dtype, whatever the shape."""
    shapes = shapes_for(dtype, comm.size)
    for at, reduction in enumerate([*reductions_of(dtype), "sum"]):
        shape = shapes[at]
        mine = numbers(comm.rank, shape, dtype)
        with Unchanged(mine):
            result = comm.all_reduce(mine, reduction)
        assert_same(result, expected_reduction(comm.size, shape, dtype, reduction))
    _check_reduce_scatter(comm, dtype)


def _check_reduce_scatter(comm: Communicator, dtype: torch.dtype) -> None:
    """Each rank gets its own part; parts may differ in shape."""
    for reduction in sorted({"sum", "mean"} & set(reductions_of(dtype))):
        shapes = shapes_for(dtype, comm.size)[: comm.size]
        mine = [numbers(comm.rank, shape, dtype) for shape in shapes]
        with Unchanged(*mine):
            result = comm.reduce_scatter(mine, reduction)
        assert_same(result, expected_reduction(comm.size, shapes[comm.rank], dtype, reduction))


def check_layouts(comm: Communicator) -> None:
    """What isn't elements in a row is added element by element all the same."""
    for make in LAYOUTS.values():
        mine, everyone = make(comm.rank), [make(rank).detach().clone() for rank in range(comm.size)]
        expected = sum(everyone[1:], start=everyone[0]).resolve_conj().resolve_neg()
        with Unchanged(mine):
            assert_same(comm.all_reduce(mine), expected)
            assert_same(comm.reduce_scatter([mine] * comm.size), expected)


# By dtype: what ranks 0, 1, ... bring, such that adding in 16 bits, in whatever order, is wrong; the sum of the first
# n is what torch gets in 64 bits and rounds once.
TOO_FINE_FOR_16_BITS = {
    torch.float16: [[2048.0, 1.0, 1.0, 1.0], [60000.0, 60000.0, -60000.0, 3.0], [1.0, 2048.0, 0.75, 0.5]],
    torch.bfloat16: [[256.0, 1.0, 1.0, 1.0], [1.0, 256.0, 1.0, 1.0]],
}


def check_16_bits_are_added_in_32(comm: Communicator) -> None:
    """One rounding, at the end, however many ranks; of two levels, each has one."""
    has_levels = comm.name in TWO_LEVEL and 1 < comm.inter_size < comm.size
    for dtype, cases in TOO_FINE_FOR_16_BITS.items():
        for case in cases:
            mine = torch.full((5,), case[comm.rank], dtype=dtype)
            exact = torch.full((5,), math.fsum(case[: comm.size]), dtype=torch.float64)
            if exact[0] < torch.finfo(torch.float32).max:
                assert_same(comm.all_reduce(mine), exact.to(dtype))
                assert_same(comm.reduce_scatter([mine] * comm.size), exact.to(dtype))
                if not has_levels:
                    _check_sum(comm, mine.clone(), exact.to(dtype))
            if case[0] < 1e5:  # the sum overflows, the mean does not
                assert_same(comm.all_reduce(mine, "mean"), (exact / comm.size).to(dtype))


def _check_sum(comm: Communicator, buffer: Tensor, expected: Tensor) -> None:
    if comm.num_addends == comm.size:
        comm.start_sum(buffer, [buffer]).wait()
        assert_same(buffer, expected)


def check_start_sum(comm: Communicator, dtype: torch.dtype) -> None:
    """Flat buffers of odd lengths, several on their way at once, come out as sums; an instrument leaves them alone."""
    cuts = [[1], [3, 5], [0, 7, 0], [1009, 1, 2], [0], [2**16 + 1, 13]]
    buffers = []
    for cut in cuts:
        buffer = comm.allocate(sum(cut), dtype, comm.device)
        assert buffer.shape == (sum(cut),)
        assert not buffer.any()
        buffer += numbers(comm.rank, buffer.shape, dtype)
        buffers.append(buffer)
    pending = [comm.start_sum(buffer, buffer.split(cut)) for buffer, cut in zip(buffers, cuts, strict=True)]
    for each in pending:
        each.wait()
    for buffer in buffers:
        if comm.num_addends == comm.size:
            assert_same(buffer, expected_reduction(comm.size, buffer.shape, dtype, "sum"))
        else:
            assert_same(buffer, numbers(comm.rank, buffer.shape, dtype))


CODECS: list[Codec] = [Bf16Codec(), Fp16Codec(block=64), Int8Codec(block=64)]


def check_coded_sum(comm: Communicator) -> None:
    """What comes is the same on all ranks and, with what they owe then, all that they gave and owed before.

    One rank's infinity or NaN is seen by all, at its place.
    """
    cuts = [[1], [3, 5], [0], [1009, 1, 2], [2**16 + 13]]
    generator = torch.Generator().manual_seed(comm.rank)
    for codec in CODECS:
        given = [torch.randn(sum(cut), generator=generator) for cut in cuts]
        before = [torch.randn(each.shape, generator=generator) / 100 for each in given]
        buffers, owed = [each.clone() for each in given], [each.clone() for each in before]
        pending = [comm.start_coded_sum(buffer, codec, its) for buffer, its in zip(buffers, owed, strict=True)]
        for each in pending:
            each.wait()
        for at, buffer in enumerate(buffers):
            _check_coded_sum(comm, buffer, given[at], before[at], owed[at])
        for value in (math.inf, math.nan):
            _check_coded_sum_of_what_is_not_finite(comm, codec, value)


def _check_coded_sum(comm: Communicator, buffer: Tensor, given: Tensor, before: Tensor, owed: Tensor) -> None:
    if comm.num_addends == 1:
        assert_same(buffer, given + before)
        assert not owed.any()
        return
    for each in comm.all_gather(buffer):
        assert_same(each, buffer)
    in_all = comm.all_reduce(given.double() + before.double())
    assert (buffer.double() + comm.all_reduce(owed.double()) - in_all).abs().le(1e-5).all()
    assert owed.abs().le(0.2).all()


def _check_coded_sum_of_what_is_not_finite(comm: Communicator, codec: Codec, value: float) -> None:
    for rank in range(comm.size):
        place = (7 + 331 * rank) % 1009
        buffer = torch.ones(1009)
        buffer[place] = value if comm.rank == rank else 1.0
        comm.start_coded_sum(buffer, codec, torch.zeros(1009)).wait()
        if comm.num_addends == comm.size:
            assert not buffer[place].isfinite(), (codec, value, rank)


def check_non_finite_numbers_survive(comm: Communicator) -> None:
    """One rank's NaN and infinity reach all, in every floating dtype."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine = torch.tensor([comm.rank, float("nan"), float("inf"), -float("inf")], dtype=dtype)
        if comm.rank:
            mine = torch.zeros(4, dtype=dtype)
        total = comm.all_reduce(mine)
        assert total[0] == 0
        assert total[1].isnan()
        assert total[2] == float("inf")
        assert total[3] == -float("inf")
