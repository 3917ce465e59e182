"""Collectives on any picklable object, of any size.

Objects are pickled, and unpickling runs code: only ranks of one job, who run the same script, may talk this way.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from renkei.communicators.channel import Channel
from renkei.communicators.collectives import CHUNK, all_gather_bytes, broadcast_bytes, check_root


def broadcast_object(channel: Channel, obj: Any, root: int, chunk: int = CHUNK) -> Any:
    """The root's object, on every rank; what the others pass is not looked at."""
    data = _dump(obj) if channel.rank == root else None
    problem = check_root(channel, root)
    headers = channel.agree("broadcast_object", None if data is None else [data], root=root, problem=problem)
    if data is None:
        data = torch.empty(headers[root].numel, dtype=torch.uint8)
    broadcast_bytes(channel, data, root, "broadcast_object", chunk)
    return obj if channel.rank == root else _load(data)


def all_gather_object(channel: Channel, obj: Any, chunk: int = CHUNK) -> list[Any]:
    """Every rank's object, on every rank."""
    data = _dump(obj)
    sizes = [header.numel for header in channel.agree("all_gather_object", [data])]
    return [_load(each) for each in all_gather_bytes(channel, data, sizes, "all_gather_object", chunk)]


def gather_object(channel: Channel, obj: Any, root: int) -> list[Any] | None:
    """Every rank's object on `root`, None elsewhere."""
    data = _dump(obj)
    headers = channel.agree("gather_object", [data], root=root, problem=check_root(channel, root))
    if channel.rank != root:
        _send(channel, data, root, 0)
        return None
    return [
        obj if rank == root else _load(_recv(channel, rank, 0, header.numel)) for rank, header in enumerate(headers)
    ]


def scatter_object(channel: Channel, objs: Sequence[Any] | None, root: int) -> Any:
    """Rank r gets the root's ``objs[r]``; what the others pass is not looked at."""
    problem = check_root(channel, root)
    if problem is None and channel.rank == root and (objs is None or len(objs) != channel.size):
        problem = f"needs one object for each of the {channel.size} ranks"
    channel.agree("scatter_object", None, root=root, problem=problem)
    if channel.rank == root:
        assert objs is not None
        for rank, obj in enumerate(objs):
            if rank != root:
                send_object(channel, obj, rank, 0)
        return objs[root]
    return recv_object(channel, root, 0)


def send_object(channel: Channel, obj: Any, dest: int, tag: int) -> None:
    """Send an object to one rank, which calls `recv_object`."""
    data = _dump(obj)
    channel.start_send(torch.tensor([data.numel()]), dest, tag, f"send to rank {dest}").wait()
    _send(channel, data, dest, tag)


def recv_object(channel: Channel, source: int, tag: int) -> Any:
    """Receive what `source` sends with `send_object`."""
    numel = torch.empty(1, dtype=torch.int64)
    channel.start_recv(numel, source, tag, f"recv from rank {source}").wait()
    return _load(_recv(channel, source, tag, int(numel)))


def _dump(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _load(data: Tensor) -> Any:
    return pickle.loads(data.numpy().data)


def _send(channel: Channel, data: Tensor, dest: int, tag: int) -> None:
    for piece in data.split(CHUNK):
        channel.start_send(piece, dest, tag, f"send to rank {dest}").wait()


def _recv(channel: Channel, source: int, tag: int, numel: int) -> Tensor:
    data = torch.empty(numel, dtype=torch.uint8)
    for piece in data.split(CHUNK):
        channel.start_recv(piece, source, tag, f"recv from rank {source}").wait()
    return data
