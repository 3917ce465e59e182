"""From one rank to another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from contract.values import assert_same, numbers
from mpi_checks.common import moving, others, rank, size
from renkei.errors import MismatchError

NUMEL = 1009


def check_large_messages_both_ways() -> None:
    """All ranks send 8 MB to all others before any of them receives."""
    numel = 2_000_003
    sent = torch.full((numel,), float(rank()))
    with moving(send=4 * numel * (size() - 1), recv=4 * numel * (size() - 1)):
        works = [dist.isend(sent, other) for other in others()]
        for other in others():
            received = torch.empty(numel)
            dist.recv(received, other)
            assert_same(received, torch.full((numel,), float(other)))
        for work in works:
            work.wait()


def check_batches_of_messages() -> None:
    previous, following = (rank() - 1) % size(), (rank() + 1) % size()
    received = torch.empty(NUMEL)
    operations = [
        dist.P2POp(dist.isend, numbers(rank(), (NUMEL,)), following),
        dist.P2POp(dist.irecv, received, previous),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same(received, numbers(previous, (NUMEL,)))


def check_tags_and_any_source() -> None:
    if rank() == 0:
        by_tag = {tag: torch.empty(3) for tag in (7, 5)}
        for tag, tensor in by_tag.items():
            dist.recv(tensor, 1, tag=tag)
        assert [by_tag[tag].tolist() for tag in (5, 7)] == [[5.0] * 3, [7.0] * 3]
        sources = set()
        for _ in others():
            tensor = torch.empty(3)
            sources.add(source := dist.recv(tensor))
            assert tensor.tolist() == [float(source)] * 3
    else:
        works = [dist.isend(torch.full((3,), float(tag)), 0, tag=tag) for tag in (5, 7)] if rank() == 1 else []
        dist.send(torch.full((3,), float(rank())), 0)
        for work in works:
            work.wait()
    dist.barrier()  # lest what comes next comes before another rank's


def check_messages_of_other_lengths() -> None:
    for came in (2, 4):
        if rank() == 0:
            with pytest.raises(MismatchError, match="rank 0: recv from rank 1"):
                dist.recv(torch.empty(3), 1)
        elif rank() == 1:
            dist.send(torch.zeros(came), 0)


def check_messages_nobody_waits_for() -> None:
    """They move on by themselves, and say so."""
    received = torch.empty(NUMEL)
    sent = [dist.isend(numbers(rank(), (NUMEL,)), other) for other in others()]
    for other in others():
        work = dist.irecv(received, other)
        reached = work.get_future().then(lambda future: future.value()[0] is received)
        assert reached.wait()
        assert work.is_completed()
        assert_same(received, numbers(other, (NUMEL,)))
    for work in sent:
        work.wait()
