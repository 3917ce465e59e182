"""Collectives on any picklable object, of any size.

Objects are pickled, and unpickling runs code: only ranks of one job, who run the same script, may talk this way.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from renkei.communicators.channel import OWN_TAG, Channel
from renkei.communicators.collectives import CHUNK, CPU, all_gather_bytes, broadcast_bytes, check_root
from renkei.communicators.point_to_point import OBJECT, check_peer, recv_envelope, send_envelope
from renkei.errors import UsageError

_NOTHING = torch.empty(0, dtype=torch.uint8, device=CPU)


def broadcast_object(channel: Channel, obj: Any, root: int, chunk: int = CHUNK) -> Any:
    """The root's object, on every rank; what the others pass is not looked at."""
    data, problem = _dump(obj) if channel.rank == root else (_NOTHING, None)
    mine = [data] if channel.rank == root else None
    headers = channel.agree("broadcast_object", mine, root=root, problem=check_root(channel, root) or problem)
    if channel.rank != root:
        data = torch.empty(headers[root].numel, dtype=torch.uint8, device=CPU)
    broadcast_bytes(channel, data, root, "broadcast_object", chunk)
    return obj if channel.rank == root else _load(data)


def all_gather_object(channel: Channel, obj: Any, chunk: int = CHUNK) -> list[Any]:
    """Every rank's object, on every rank."""
    data, problem = _dump(obj)
    sizes = [header.numel for header in channel.agree("all_gather_object", [data], problem=problem)]
    return [_load(each) for each in all_gather_bytes(channel, data, sizes, "all_gather_object", chunk)]


def gather_object(channel: Channel, obj: Any, root: int) -> list[Any] | None:
    """Every rank's object on `root`, None elsewhere."""
    data, problem = _dump(obj)
    headers = channel.agree("gather_object", [data], root=root, problem=check_root(channel, root) or problem)
    if channel.rank != root:
        _send(channel, data, root, OWN_TAG)
        return None
    return [
        obj if rank == root else _load(_recv(channel, rank, OWN_TAG, header.numel))
        for rank, header in enumerate(headers)
    ]


def scatter_object(channel: Channel, objs: Sequence[Any] | None, root: int) -> Any:
    """Rank r gets the root's ``objs[r]``; what the others pass is not looked at."""
    problem = check_root(channel, root)
    dumped: list[tuple[Tensor, str | None]] = []
    if problem is None and channel.rank == root:
        if objs is None or len(objs) != channel.size:
            problem = f"needs one object for each of the {channel.size} ranks"
        else:
            dumped = [_dump(obj) for obj in objs]
            problem = next((each for _, each in dumped if each), None)
    channel.agree("scatter_object", None, root=root, problem=problem)
    if channel.rank != root:
        return _recv_object(channel, root, OWN_TAG)
    for rank, (data, _) in enumerate(dumped):
        if rank != root:
            _send_with_length(channel, data, rank, OWN_TAG)
    assert objs is not None
    return objs[root]


def send_object(channel: Channel, obj: Any, dest: int, tag: int) -> None:
    """Send an object to one rank, which calls `recv_object`."""
    check_peer(channel, dest, "dest", tag)
    data, problem = _dump(obj)
    if problem:
        raise UsageError(f"rank {channel.rank}: send to rank {dest}: {problem}")
    _send_with_length(channel, data, dest, tag)


def recv_object(channel: Channel, source: int, tag: int) -> Any:
    """Receive what `source` sends with `send_object`."""
    check_peer(channel, source, "source", tag)
    return _recv_object(channel, source, tag)


def _recv_object(channel: Channel, source: int, tag: int) -> Any:
    return _load(_recv(channel, source, tag, recv_envelope(channel, OBJECT, source, tag)))


def _dump(obj: Any) -> tuple[Tensor, str | None]:
    """The object's bytes, and why there are none if it can't be pickled."""
    try:
        return torch.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8), None
    except Exception as error:  # whatever the object's own methods raise: the other ranks are waiting
        return _NOTHING, f"{type(obj).__name__} can't be pickled: {error}"


def _load(data: Tensor) -> Any:
    return pickle.loads(data.numpy().data)


def _send_with_length(channel: Channel, data: Tensor, dest: int, tag: int) -> None:
    send_envelope(channel, OBJECT, data.numel(), dest, tag)
    _send(channel, data, dest, tag)


def _send(channel: Channel, data: Tensor, dest: int, tag: int) -> None:
    for piece in data.split(CHUNK):
        channel.start_send(piece, dest, tag, f"send to rank {dest}").wait()


def _recv(channel: Channel, source: int, tag: int, numel: int) -> Tensor:
    data = torch.empty(numel, dtype=torch.uint8, device=CPU)
    for piece in data.split(CHUNK):
        channel.start_recv(piece, source, tag, f"recv from rank {source}").wait()
    return data
