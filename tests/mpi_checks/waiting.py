"""What becomes of a rank that waits for one that comes late, has left, or has no MPI. Each check has its own groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from contract.values import assert_same, numbers
from mpi_checks.common import others, rank, reduced, size
from renkei.communicators.backends.mpi import meeting
from renkei.communicators.backends.mpi.transport import create_mpi_transport
from renkei.errors import DeadlineError, LaunchError, PeerLostError, RenkeiError, UsageError

SOON = 4.0  # seconds; generous, for what takes one
WAITS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.zeros(3), group=group),
    "broadcast": lambda group: dist.broadcast(torch.zeros(3), size() - 1, group=group),
    "all_to_all": lambda group: dist.all_to_all_single(torch.zeros(size()), torch.zeros(size()), group=group),
    "recv": lambda group: dist.recv(torch.zeros(3), size() - 1, group=group),
    "send": lambda group: dist.send(torch.zeros(3), size() - 1, group=group),
}


def is_last() -> bool:
    return rank() == size() - 1


@contextmanager
def own_group(timeout: float) -> Iterator[Any]:
    """A group of all ranks with a timeout of its own. Given up at the end."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


@contextmanager
def soon() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON


def check_who_waits_too_long_is_told_where() -> None:
    for doing in ("all_reduce", "all_to_all"):
        with own_group(timeout=0.5) as group:
            if is_last():
                time.sleep(1.0)
                continue
            with soon(), pytest.raises(DeadlineError, match=rf"rank {rank()} waited 0\.5 s .* in {doing}"):
                WAITS[doing](group)
            with soon(), pytest.raises(DeadlineError, match=doing):  # what was begun is still on its way
                dist.barrier(group=group)


def check_futures_have_a_deadline_too() -> None:
    with own_group(timeout=0.5) as group:
        if is_last():
            time.sleep(1.0)
        else:
            future = dist.all_reduce(torch.zeros(100_003), group=group, async_op=True).get_future()
            with soon(), pytest.raises(RuntimeError, match="DeadlineError"):
                future.wait()


def check_a_wait_may_be_shorter_than_the_groups() -> None:
    with own_group(timeout=20) as group:
        if is_last():
            time.sleep(1.0)
        tensor = numbers(rank())
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if not is_last():
            with pytest.raises(DeadlineError):
                work.wait(timedelta(seconds=0.1))
        work.wait()
        assert_same(tensor, reduced(torch.float32, "sum", 37))


def check_messages_have_a_deadline() -> None:
    with own_group(timeout=20) as group:
        if rank() == 0:
            work = dist.irecv(torch.zeros(3), 1, group=group)
            with soon(), pytest.raises(DeadlineError, match=r"rank 0 waited 0\.2 s .* in recv from rank 1"):
                work.wait(timedelta(seconds=0.2))
            assert not work.is_completed()
            work = dist.isend(torch.zeros(3), 1, group=group)
            with soon(), pytest.raises(DeadlineError, match=r"rank 0 waited 0\.2 s .* in send to rank 1"):
                work.wait(timedelta(seconds=0.2))


def check_who_has_left_is_not_waited_for() -> None:
    for doing, wait in WAITS.items():
        with own_group(timeout=20) as group:
            dist.barrier(group=group)
            if is_last():
                time.sleep(0.1)
                group.shutdown()
                continue
            for _ in range(2):
                with soon(), pytest.raises(PeerLostError, match=f"rank {rank()} lost rank {size() - 1} in {doing}"):
                    wait(group)


def check_who_has_left_after_its_part_is_not_missed() -> None:
    """The root has sent all it had to; whoever comes later still gets it."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    root, tensor = size() - 1, numbers(rank())
    messages = [dist.irecv(torch.zeros(3), root, group=group)] if not is_last() else []
    if not is_last():
        time.sleep(1.0 + rank())
    dist.broadcast(tensor, root, group=group)
    messages += [dist.isend(torch.zeros(3), other, group=group) for other in others()] if is_last() else []
    for message in messages:
        message.wait()
    if is_last():
        group.shutdown()
    else:
        time.sleep(1.0)
        assert_same(tensor, numbers(root))
    dist.barrier()
    dist.destroy_process_group(group)


def check_closing_ends_what_waits_here() -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    if rank() == 0:
        sum_, message = (
            dist.all_reduce(torch.zeros(100_003), group=group, async_op=True),
            dist.irecv(torch.zeros(3), 1, group=group),
        )
        time.sleep(0.2)
        with soon():
            group.shutdown()
            for work in (sum_, message):
                with pytest.raises(RenkeiError, match="closed"):
                    work.wait()
            with pytest.raises(UsageError, match="closed"):
                dist.all_reduce(torch.zeros(3), group=group)
            with pytest.raises(UsageError, match="closed"):
                dist.isend(torch.zeros(3), 1, group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def own_store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def check_a_rank_without_mpi_is_told_on_all() -> None:
    def find_problem(mpi: Any, num_ranks: int) -> str | None:
        return "no MPI here" if rank() == 1 else None

    without = mock.patch.object(meeting, "find_problem", find_problem)
    with without, soon(), pytest.raises(LaunchError, match=r"^rank 1: no MPI here$"):
        create_mpi_transport(own_store("without"), rank(), size(), 20)


def check_a_rank_that_does_not_come_is_waited_for_in_vain() -> None:
    if not is_last():
        with soon(), pytest.raises(DeadlineError, match=f"rank {rank()}"):
            create_mpi_transport(own_store("missing"), rank(), size(), 0.5)
    dist.barrier()


def check_ranks_of_two_jobs_are_told() -> None:
    first = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=size(), rank=0), Query_thread=lambda: 3, THREAD_MULTIPLE=3)
    all_are_first = mock.patch.object(meeting, "load", return_value=first)
    with all_are_first, soon(), pytest.raises(LaunchError, match="ranks 0 and 1 are both rank 0 of their MPI"):
        create_mpi_transport(own_store("two"), rank(), size(), 20)
