"""Futures, order, chunks, and groups of some of the ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contract.values import assert_same, numbers
from mpi_checks import messages, movement, reductions
from mpi_checks.common import in_chunks, others, rank, reduced, size
from renkei.errors import UsageError


def check_many_small_chunks() -> None:
    """The same as with large ones."""
    with in_chunks(100):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool):
            tensor = numbers(rank(), (1009,), dtype)
            dist.all_reduce(tensor)
            assert_same(tensor, reduced(dtype, "sum", 1009))
        reductions.check_every_reduce_scatter_of_every_dtype()
        movement.check_every_dtype_moves()
        movement.check_all_to_all_of_uneven_parts()
        messages.check_large_messages_both_ways()


def check_futures() -> None:
    tensor = numbers(rank(), (100_003,))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert_same(doubled.wait(), reduced(torch.float32, "sum", 100_003) * 2)
    assert work.is_completed()
    assert work.is_success()
    failed = dist.all_reduce(torch.zeros(3, dtype=torch.int64), dist.ReduceOp.AVG, async_op=True)
    with pytest.raises(RuntimeError, match=r"the mean of torch\.int64"):
        failed.get_future().wait()
    with pytest.raises(UsageError, match=r"the mean of torch\.int64"):
        failed.wait()


def check_operations_on_their_way_keep_their_order() -> None:
    """Awaited in reverse, and differently on different ranks."""
    tensors = [numbers(rank() + each, (1 + 97 * each,)) for each in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works[:: 1 if rank() else -1]:
        work.wait()
    for each, tensor in enumerate(tensors):
        assert_same(tensor, reduced(torch.float32, "sum", tensor.numel()) + size() * each)


def check_nobody_leaves_a_barrier_early() -> None:
    for _ in range(5):
        dist.barrier()
    assert dist.barrier(async_op=True).wait(timedelta(seconds=20))


def check_new_groups_of_any_ranks() -> None:
    subsets = [[each] for each in range(size())] + [[0, size() - 1], [size() - 1, 0], list(range(size()))]
    groups = [dist.new_group(ranks) for ranks in subsets]
    for ranks, group in zip(subsets, groups, strict=True):
        if rank() in ranks:
            tensor = torch.tensor([float(rank())])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
            dist.broadcast(tensor, src=ranks[-1], group=group)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def check_groups_do_not_meet() -> None:
    """What is on its way in two groups of the same ranks is awaited in opposite orders."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [numbers(rank() + 5 * each, (50_021,)) for each in range(2)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    messages = [dist.isend(tensors[0][:3], other, group=groups[1]) for other in others()]
    for work in works[:: 1 if rank() else -1]:
        work.wait()
    for other in others():
        dist.recv(torch.empty(3), other, group=groups[1])
    for message in messages:
        message.wait()
    for each, tensor in enumerate(tensors):
        assert_same(tensor, reduced(torch.float32, "sum", 50_021) + 5 * each * size())
    for group in groups:
        dist.destroy_process_group(group)


def check_groups_come_and_go() -> None:
    """MPI has some thousands of communicators at a time, and each of ours has two: they are given back."""
    for _ in range(40):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
