"""Checks of send and recv, of tensors and of objects, and of collectives on objects."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from contract.values import DTYPES, LAYOUTS, SHAPES, Unchanged, assert_same, numbers
from renkei.communicators import collectives, objects
from renkei.communicators.communicator import Communicator
from renkei.errors import MismatchError, PeerLostError, RenkeiError, UsageError


def _neighbours(comm: Communicator) -> tuple[int, int]:
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def _pass_round(comm: Communicator, data: Any, tag: int = 0) -> Any:
    """Send to the next rank what the previous one's is received for; the even ones send first."""
    previous, following = _neighbours(comm)
    if comm.rank == 0:
        comm.send(data, following, tag)
        return comm.recv(previous, tag)
    received = comm.recv(previous, tag)
    comm.send(data, following, tag)
    return received


def check_tensors_go_round(comm: Communicator) -> None:
    """Every dtype, shape and layout arrives as it was, one by one and as a tuple of them all."""
    previous, _ = _neighbours(comm)

    def make(rank: int) -> list[torch.Tensor]:
        mixed = [numbers(rank, SHAPES[at % len(SHAPES)], dtype) for at, dtype in enumerate(DTYPES)]
        return [*mixed, *(layout(rank) for layout in LAYOUTS.values()), numbers(rank, (rank, 3))]

    mine, expected = make(comm.rank), [tensor.detach() for tensor in make(previous)]
    with Unchanged(*mine):
        for tensor, other in zip(mine, expected, strict=True):
            assert_same(_pass_round(comm, tensor), other)
        received = _pass_round(comm, mine)
    assert isinstance(received, tuple)
    for tensor, other in zip(received, expected, strict=True):
        assert_same(tensor, other)


def check_kinds_are_kept(comm: Communicator) -> None:
    """One tensor comes as a tensor, a sequence as a tuple: of one, of none."""
    assert isinstance(_pass_round(comm, torch.zeros(3)), torch.Tensor)
    (only,) = _pass_round(comm, [torch.ones(3)])
    assert_same(only, torch.ones(3))
    assert _pass_round(comm, []) == ()
    assert _pass_round(comm, ()) == ()


def check_tags(comm: Communicator) -> None:
    """Messages of one tag stay in order; those of different tags don't meet, in whatever order they are received."""
    previous, following = _neighbours(comm)

    def send(tag: int) -> None:
        for which in ("first", "second"):
            comm.send_object([tag, which], following, tag)

    if comm.rank == 0:  # sending returns when the message was received, so each tag has a thread
        threads = [threading.Thread(target=send, args=(tag,)) for tag in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if comm.rank == 1:
        for tag in (3, 0, 4, 1, 2):
            assert [comm.recv_object(previous, tag) for _ in range(2)] == [[tag, "first"], [tag, "second"]]
    comm.barrier()


def check_wrong_peers(comm: Communicator) -> None:
    """A rank can't talk to itself, or to one there isn't, and says so at once."""
    begin = time.monotonic()
    for peer in (comm.rank, -1, comm.size):
        for call in (
            lambda peer=peer: comm.send(torch.zeros(3), peer),
            lambda peer=peer: comm.recv(peer),
            lambda peer=peer: comm.send_object("object", peer),
            lambda peer=peer: comm.recv_object(peer),
        ):
            with pytest.raises(UsageError, match=f"rank {comm.rank}"):
                call()
    with pytest.raises(RenkeiError):
        comm.send(torch.zeros(3, dtype=torch.float8_e8m0fnu), (comm.rank + 1) % comm.size)
    assert time.monotonic() - begin < 1


def check_kinds_that_do_not_fit(comm: Communicator) -> None:
    """What receives the other kind of message says so; who sent it is left when the receiver ends."""
    previous, following = _neighbours(comm)
    if comm.rank == 0:
        with contextlib.suppress(PeerLostError):  # unless it has left already: a backend may keep short messages
            comm.send(torch.zeros(3), following)
        with pytest.raises(PeerLostError):
            comm.recv(following)
    elif comm.rank == 1:
        with pytest.raises(MismatchError, match="rank 0 has sent something with send, but what send_object sends was"):
            comm.recv_object(previous)
        comm.close()


def check_another_default_device(comm: Communicator) -> None:
    """What a script sets as its default is no matter for tensors that say where they are."""
    cpu = {"device": "cpu"}
    previous, following = _neighbours(comm)
    with torch.device("meta"):
        mine = torch.full((3,), float(comm.rank), **cpu)
        assert comm.all_reduce(mine).tolist() == [comm.size * (comm.size - 1) / 2] * 3
        assert comm.broadcast(mine, comm.size - 1).tolist() == [comm.size - 1.0] * 3
        assert [each.tolist() for each in comm.all_gather(mine)] == [[float(r)] * 3 for r in range(comm.size)]
        assert comm.all_to_all([mine] * comm.size)[-1].tolist() == [comm.size - 1.0] * 3
        assert comm.scatter([mine] * comm.size if comm.rank == 0 else None).tolist() == [0.0] * 3
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))
        assert comm.broadcast_object("object") == "object"
        if comm.rank == 0:
            comm.send(mine, following)
            comm.send_object(0, following)
        if comm.rank == 1:
            assert comm.recv(previous).tolist() == [0.0] * 3
            assert comm.recv_object(previous) == 0


@dataclass
class Thing:
    """Something of a user's own."""

    name: str
    values: list[Any]


def things(rank: int) -> list[Any]:
    """Objects of many kinds."""
    return [None, rank, "連携", b"", {"a": [rank, (1.5, {2})]}, Thing("thing", [rank]), ValueError("rank", rank),
            torch.tensor([rank]), np.arange(rank), bytes(rank * 70001), [[]] * rank, Thing, float("inf")]  # fmt: skip


def _alike(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


def check_objects(comm: Communicator) -> None:
    """Every kind of object, by every operation and root."""
    everyone = [things(rank) for rank in range(comm.size)]
    mine = everyone[comm.rank]
    for at, thing in enumerate(mine):
        assert all(map(_alike, comm.all_gather_object(thing), [others[at] for others in everyone]))
    for root in range(comm.size):
        is_root = comm.rank == root
        assert _alike(comm.broadcast_object(mine, root), everyone[root])
        gathered = comm.gather_object(mine, root)
        assert (gathered is None) == (not is_root)
        assert all(map(_alike, gathered or everyone, everyone))
        assert _alike(comm.scatter_object(everyone if is_root else None, root), mine)


def check_objects_are_combined_in_order(comm: Communicator) -> None:
    """With any function, rank 0's first."""
    assert comm.all_reduce_object(comm.rank) == comm.size * (comm.size - 1) // 2
    assert comm.all_reduce_object([comm.rank]) == list(range(comm.size))
    nested = comm.all_reduce_object(str(comm.rank), lambda one, other: f"({one}{other})")
    assert nested == ["0", "(01)", "((01)2)", "(((01)2)3)"][comm.size - 1]
    assert comm.all_reduce_object(comm.rank, max) == comm.size - 1


def check_objects_go_round(comm: Communicator) -> None:
    """From rank to rank."""
    previous, following = _neighbours(comm)
    for mine, expected in zip(things(comm.rank), things(previous), strict=True):
        if comm.rank == 0:
            comm.send_object(mine, following, 7)
            assert _alike(comm.recv_object(previous, 7), expected)
        else:
            assert _alike(comm.recv_object(previous, 7), expected)
            comm.send_object(mine, following, 7)


def check_chunks(comm: Communicator) -> None:
    """What doesn't fit into one message comes in several; the last may be shorter, or just fit."""
    channel, root = comm._channel, comm.size - 1
    for length, chunk in [(10, 1), (103, 7), (355678, 23789), (7, 7), (8, 7), (6, 7)]:
        data = bytes(each % 251 for each in range(length))
        assert objects.broadcast_object(channel, data if comm.rank == root else None, root, chunk=chunk) == data
        mine = data[: length - comm.rank]  # each rank's has its own length
        assert objects.all_gather_object(channel, mine, chunk=chunk) == [data[: length - r] for r in range(comm.size)]
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = collectives.all_gather_bytes(channel, tensor, [length] * comm.size, "test", chunk=chunk)
        for each in gathered:
            assert_same(each, tensor)
