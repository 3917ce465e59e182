"""Checks of who belongs to a communicator: topology, split, duplicate, barrier, life and death."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from contract.values import assert_same, numbers
from renkei.communicators.communicator import Communicator
from renkei.errors import DeadlineError, PeerLostError, RenkeiError, UsageError
from renkei.topology import Topology

NODES: list[list[str]] = [
    ["a"], ["a", "a"], ["a", "b"], ["a", "b", "a"], ["a", "b", "b"], ["a", "b", "c"], ["a", "a", "a", "a"],
    ["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "b"], ["a", "b", "c", "a"],
]  # fmt: skip


def check_topology(comm: Communicator, nodes: Sequence[str]) -> None:
    """What the communicator says of itself is what its nodes imply."""
    expected = Topology.from_nodes(comm.rank, nodes)
    assert comm.topology == expected
    for name in ("rank", "size", "intra_rank", "intra_size", "inter_rank", "inter_size"):
        assert getattr(comm, name) == getattr(expected, name)
    assert comm.all_gather_object(comm.rank) == list(range(len(nodes)))
    assert str(comm.rank) in repr(comm)
    assert comm.name in repr(comm)


def assert_works(comm: Communicator, own: int, members: Sequence[int]) -> None:
    """The communicator joins these ranks of the whole, of which this one is `own`, in this order, and adds."""
    assert (comm.rank, comm.size) == (members.index(own), len(members))
    assert comm.all_gather_object(own) == list(members)
    assert_same(comm.all_reduce(torch.tensor([own])), torch.tensor([sum(members)]))
    comm.barrier()


def check_split(comm: Communicator) -> None:
    """By colour and key; a rank without colour gets nothing; groups of one and groups of groups."""
    everyone = list(range(comm.size))
    evens = [rank for rank in everyone if rank % 2 == comm.rank % 2]
    half = comm.split(comm.rank % 2)
    assert_works(half, comm.rank, evens)
    assert_works(comm.split(0, key=-comm.rank), comm.rank, everyone[::-1])
    assert_works(comm.split(0, key=0), comm.rank, everyone)  # equal keys: by rank
    assert_works(comm.split(10 * comm.rank), comm.rank, [comm.rank])
    some = comm.split(None if comm.rank == 0 else 7)
    assert (some is None) == (comm.rank == 0)
    if some is not None:
        assert_works(some, comm.rank, everyone[1:])
    assert comm.split(None) is None
    quarter = half.split(half.rank % 2)
    assert_works(quarter, comm.rank, evens[half.rank % 2 :: 2])
    assert_works(comm, comm.rank, everyone)  # and the whole is as it was


def check_descendants_are_alike(comm: Communicator) -> None:
    """They have the same algorithm and options, and the nodes of their own ranks."""
    for child in (comm.split(0), comm.duplicate(), comm.split(0).duplicate()):
        assert type(child) is type(comm)
        assert child.options == comm.options
        assert child.topology == comm.topology
    assert comm.duplicate(timeout=4.0).options.timeout == 4.0
    node = comm.split(comm.inter_rank)
    assert (node.rank, node.size, node.inter_size) == (comm.intra_rank, comm.intra_size, 1)
    leaders = comm.split(0 if comm.intra_rank == 0 else None)
    assert (leaders is None) == (comm.intra_rank > 0)
    if leaders is not None:
        assert (leaders.rank, leaders.size, leaders.intra_size) == (comm.inter_rank, comm.inter_size, 1)


def check_duplicate(comm: Communicator) -> None:
    """Messages of a duplicate never meet the original's, in whatever order ranks turn to them."""
    other = comm.duplicate()
    assert_works(other, comm.rank, list(range(comm.size)))
    if comm.size > 1:
        if comm.rank == 0:
            sender = threading.Thread(target=comm.send_object, args=("original", 1))
            sender.start()
            other.send_object("duplicate", 1)
            sender.join()
        if comm.rank == 1:
            assert other.recv_object(0) == "duplicate"
            assert comm.recv_object(0) == "original"
    other.close()
    assert_works(comm, comm.rank, list(range(comm.size)))


def check_sums_of_descendants_do_not_meet(comm: Communicator) -> None:
    """Sums on their way over two communicators are awaited in opposite orders."""
    other = comm.duplicate()
    buffers = [numbers(comm.rank, (1009,)), numbers(comm.rank + 5, (1009,))]
    pending = [one.start_sum(each, [each]) for one, each in zip((comm, other), buffers, strict=True)]
    for each in pending if comm.rank % 2 else pending[::-1]:
        each.wait()
    if comm.num_addends == comm.size:
        total = comm.size * (torch.arange(1009) % 7 + (comm.size - 1) / 2)
        assert_same(buffers[0], total)
        assert_same(buffers[1], total + 5 * comm.size)


def check_barrier_waits(comm: Communicator) -> tuple[float, float]:
    """Returns when this rank came and when it left, the last rank coming late."""
    for _ in range(3):
        comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    came = time.monotonic()
    comm.barrier()
    return came, time.monotonic()


def check_barrier_names_the_missing(comm: Communicator) -> str:
    """Returns what every rank is told, the late ones too, when the last two don't come in time."""
    if comm.rank >= comm.size - 2 and comm.rank:
        time.sleep(0.5)
    with pytest.raises(DeadlineError) as caught:
        comm.barrier(timeout=0.2)
    comm.barrier()  # the next one is as if that had not been
    return str(caught.value)


def check_closed(comm: Communicator) -> None:
    """A closed communicator refuses everything, at any number of ranks, and so do its descendants."""
    child = comm.duplicate()
    with comm as entered:
        assert entered is comm
        comm.barrier()
    comm.close()
    for closed in (comm, child):
        for call in _calls(closed):
            with pytest.raises(UsageError, match=rf"rank {comm.rank}: .*closed"):
                call()


def _calls(comm: Communicator) -> list[Callable[[], Any]]:
    tensor = torch.zeros(3)
    calls = [lambda: comm.all_reduce(tensor), lambda: comm.broadcast(tensor), lambda: comm.all_gather(tensor),
             lambda: comm.all_gather_object(0), lambda: comm.barrier(), lambda: comm.split(0), lambda: comm.duplicate(),
             lambda: comm.group]  # fmt: skip
    if comm.size > 1:
        calls += [lambda: comm.send(tensor, 1 - comm.rank if comm.rank < 2 else 0)]
    if comm.num_addends == comm.size:
        calls += [lambda: comm.start_sum(tensor, [tensor]).wait()]
    return calls


def check_dropped_descendants_are_let_go(comm: Communicator) -> None:
    """A descendant that nobody holds has no connections any more."""
    dropped = weakref.ref(comm.duplicate())
    gc.collect()
    assert dropped() is None
    assert_works(comm, comm.rank, range(comm.size))


def check_copies(comm: Communicator) -> None:
    """A copy of a model that holds a communicator holds the same; pickling is refused."""
    assert copy.deepcopy({"comm": [comm]})["comm"][0] is comm
    with pytest.raises(UsageError, match="pickled"):
        pickle.dumps(comm)


def check_close_is_noticed(comm: Communicator) -> float:
    """Closing reaches those that wait, though somebody still holds what was on its way; returns when it did."""
    comm.all_reduce(torch.zeros(3))
    if comm.rank == comm.size - 1:
        held = comm._channel.start_recv(torch.zeros(3), 0, 9, "a message that never comes")
        comm.close()
        time.sleep(2.0)
        with pytest.raises(UsageError, match=r"a message that never comes.*closed"):
            held.wait()
        return time.monotonic()
    with pytest.raises(PeerLostError):
        comm.recv(comm.size - 1)
    return time.monotonic()


# What ranks can be waiting in when another ends.
WAITS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.zeros(3)),
    "all_gather": lambda comm: comm.all_gather(torch.zeros(3)),
    "broadcast": lambda comm: comm.broadcast(torch.zeros(3)),
    "all_gather_object": lambda comm: comm.all_gather_object(0),
    "recv": lambda comm: comm.recv(comm.size - 1),
    "recv_object": lambda comm: comm.recv_object(comm.size - 1),
    "send": lambda comm: comm.send(torch.zeros(2**22), comm.size - 1),  # more than is sent ahead of its receiver
}


def check_peer_lost(comm: Communicator, wait: Callable[[Communicator], Any]) -> float:
    """The last rank ends while the others wait for it; returns how long they did."""
    comm.all_reduce(torch.zeros(3))
    if comm.rank == comm.size - 1:
        time.sleep(0.1)
        return 0.0
    begin = time.monotonic()
    for _ in range(2):  # what begins after the loss is known fails like what it is met in
        with pytest.raises(PeerLostError, match=f"rank {comm.rank}"):
            wait(comm)
    return time.monotonic() - begin


def check_sum_of_lost_peer(comm: Communicator) -> None:
    """A sum on its way fails too, when it is awaited."""
    if comm.rank == comm.size - 1 or comm.num_addends != comm.size:
        return
    buffer = torch.zeros(1009)
    pending = comm.start_sum(buffer, [buffer])
    with pytest.raises(PeerLostError):
        pending.wait()


def check_deadline(comm: Communicator) -> None:
    """A rank that doesn't come in time is an error on those that wait, which says how it waited."""
    if comm.rank == comm.size - 1:
        time.sleep(2 * comm.options.timeout)
        return
    with pytest.raises(RenkeiError) as caught:
        comm.all_reduce(torch.zeros(3))
    # who waited first meets the deadline; others may wait for a rank that has met it and closed
    assert isinstance(caught.value, (DeadlineError, PeerLostError))
