"""What only moves: tensors of every dtype, objects, tensors with gaps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from contract.values import COMPLEX, FLOATS, INTEGERS, assert_same, numbers
from mpi_checks.common import moving, others, rank, reduced, size
from renkei.errors import MismatchError


def check_every_dtype_moves() -> None:
    for dtype in [*FLOATS, *COMPLEX, *INTEGERS, torch.float8_e4m3fn]:
        root, num_bytes = size() - 1, 33 * dtype.itemsize
        tensor = numbers(rank(), (3, 11), dtype)
        everyones = [numbers(each, (3, 11), dtype) for each in range(size())]
        with moving(broadcast=num_bytes, allgather=2 * num_bytes, gather=num_bytes):
            sent = tensor.clone()
            dist.broadcast(sent, root)
            gathered = [torch.empty_like(tensor) for _ in range(size())]
            dist.all_gather(gathered, tensor)
            together = torch.empty(size() * 3, 11, dtype=dtype)
            dist.all_gather_into_tensor(together, tensor)
            at_root = [torch.empty_like(tensor) for _ in range(size())] if rank() == root else None
            dist.gather(tensor, at_root, root)
        assert_same(sent, everyones[root])
        for actual, expected in zip([*gathered, *together.split(3), *(at_root or [])], everyones * 3, strict=False):
            assert_same(actual, expected)
        part = torch.empty_like(tensor)
        dist.scatter(part, [each.flip(0) for each in everyones] if rank() == root else None, root)
        assert_same(part, everyones[rank()].flip(0))


def check_all_to_all_of_uneven_parts() -> None:
    """Rank s sends s * r + (r > s) rows to rank r: to some none."""

    def rows(source: int, dest: int) -> int:
        return source * dest + (dest > source)

    def part(source: int, dest: int) -> Tensor:
        return numbers(10 * source + dest, (rows(source, dest), 3))

    sends = [rows(rank(), dest) for dest in range(size())]
    receives = [rows(source, rank()) for source in range(size())]
    expected = [part(source, rank()) for source in range(size())]
    output = torch.empty(sum(receives), 3)
    with moving(all_to_all=12 * sum(sends)):
        dist.all_to_all_single(output, torch.cat([part(rank(), dest) for dest in range(size())]), receives, sends)
    assert_same(output, torch.cat(expected))
    outputs = [torch.empty(count, 3) for count in receives]
    dist.all_to_all(outputs, [part(rank(), dest) for dest in range(size())])
    for actual, wanted in zip(outputs, expected, strict=True):
        assert_same(actual, wanted)


def check_all_to_all_of_sizes_that_do_not_fit() -> None:
    """Rank 0 sends to rank 1 less than that expects, and then more."""
    group = dist.new_group()
    for sent in (3, 5):
        sizes = [sent if (rank(), dest) == (0, 1) else 4 for dest in range(size())]
        outcome: AbstractContextManager[object] = nullcontext()
        if rank() == 1:
            outcome = pytest.raises(MismatchError, match=r"rank 1: .*(12 bytes came|more came).*sizes must fit")
        with outcome:
            dist.all_to_all_single(torch.empty(4 * size()), torch.zeros(sum(sizes)), [4] * size(), sizes, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def check_objects() -> None:
    mine = {"rank": rank(), "text": "x" * 1000 * rank()}
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, mine)
    assert [each["rank"] for each in gathered] == list(range(size()))
    broadcast = [mine if rank() == 1 else None]
    dist.broadcast_object_list(broadcast, src=1)
    assert broadcast == [gathered[1]]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [("for", each) for each in range(size())] if rank() == 0 else None, src=0)
    assert scattered == [("for", rank())]
    at_root: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(mine, at_root, dst=0)
    assert at_root is None or at_root == gathered
    sent = [mine]
    if rank() == 0:
        dist.send_object_list(sent, dst=1)
    elif rank() == 1:
        dist.recv_object_list(sent, src=0)
        assert sent == [gathered[0]]


def check_tensors_with_gaps() -> None:
    """Elements that don't lie in a row, and numbers that are negated only when they are read."""
    gaps = numbers(rank(), (14, 6))[::2, ::3]
    dist.all_reduce(gaps)
    assert_same(gaps, reduced(torch.float32, "sum", 84).view(14, 6)[::2, ::3])
    gathered = [torch.empty(2, 14).t()[::2] for _ in range(size())]
    dist.all_gather(gathered, numbers(rank(), (2, 7)).t())
    for each, tensor in enumerate(gathered):
        assert_same(tensor, numbers(each, (2, 7)).t())
    negated = numbers(rank(), (5,), torch.complex64).conj().imag
    assert negated.is_neg()
    dist.all_reduce(negated)
    assert_same(negated, reduced(torch.float32, "sum", 5))
    received = torch.empty(6, 4)[:, ::2]
    works = [dist.isend(numbers(rank(), (2, 6)).t(), other) for other in others()]
    future = dist.irecv(received, others()[0]).get_future()
    future.wait()
    assert_same(received, numbers(others()[0], (2, 6)).t())
    for other in others()[1:]:
        dist.recv(received, other)
    for work in works:
        work.wait()
