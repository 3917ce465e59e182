"""Sending tensors from one rank to another: the receiver need not know their number, shapes or dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from renkei.communicators.channel import OWN_TAG, Channel
from renkei.communicators.collectives import CPU, as_bytes
from renkei.communicators.headers import DTYPES, problem_with
from renkei.errors import MismatchError, UsageError

_SINGLE = -1  # in place of the number of tensors: one tensor, not a sequence of one
TENSORS, OBJECT = 0, 1
_SENT_WITH = {TENSORS: "send", OBJECT: "send_object"}


def send(channel: Channel, data: Tensor | Sequence[Tensor], dest: int, tag: int, device: torch.device) -> None:
    """Send one tensor, or several of any shapes and dtypes, from `device`, where the receiver will have them."""
    check_peer(channel, dest, "dest", tag)
    doing = f"send to rank {dest}"
    tensors = [data] if isinstance(data, Tensor) else list(data)
    if problem := problem_with(tensors):
        raise UsageError(f"rank {channel.rank}: {doing}: {problem}")
    description = [_SINGLE if isinstance(data, Tensor) else len(tensors)]
    for tensor in tensors:
        description += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    send_envelope(channel, TENSORS, len(description), dest, tag)
    channel.start_send(torch.tensor(description, device=CPU), dest, tag, doing).wait()
    for tensor in tensors:
        if tensor.numel():
            channel.start_send(as_bytes(tensor.to(device)), dest, tag, doing).wait()


def recv(channel: Channel, source: int, tag: int, device: torch.device) -> Tensor | tuple[Tensor, ...]:
    """Receive what `source` sends: a tensor if it sent one, a tuple if it sent a sequence, even of length 1."""
    check_peer(channel, source, "source", tag)
    doing = f"recv from rank {source}"
    description = torch.empty(recv_envelope(channel, TENSORS, source, tag), dtype=torch.int64, device=CPU)
    channel.start_recv(description, source, tag, doing).wait()
    count, *rest = description.tolist()
    tensors = []
    for _ in range(1 if count == _SINGLE else count):
        dtype, ndim, *rest = rest
        shape, rest = rest[:ndim], rest[ndim:]
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if tensor.numel():
            channel.start_recv(as_bytes(tensor), source, tag, doing).wait()
        tensors.append(tensor)
    return tensors[0] if count == _SINGLE else tuple(tensors)


def send_envelope(channel: Channel, kind: int, length: int, dest: int, tag: int) -> None:
    """Tell what will follow, and how much of it."""
    channel.start_send(torch.tensor([kind, length], device=CPU), dest, tag, f"send to rank {dest}").wait()


def recv_envelope(channel: Channel, kind: int, source: int, tag: int) -> int:
    """How much will follow; raises `MismatchError` if it is of another kind."""
    envelope = torch.empty(2, dtype=torch.int64, device=CPU)
    channel.start_recv(envelope, source, tag, f"recv from rank {source}").wait()
    found, length = envelope.tolist()
    if found != kind:
        raise MismatchError(
            f"rank {channel.rank}: rank {source} has sent something with {_SENT_WITH[found]}, but what "
            f"{_SENT_WITH[kind]} sends was expected; pair send with recv, and send_object with recv_object"
        )
    return length


def check_peer(channel: Channel, peer: int, name: str, tag: int) -> None:
    """Raise `UsageError` unless `peer` is another rank, and the tag one that users may have."""
    if not 0 <= tag < OWN_TAG:
        raise UsageError(f"rank {channel.rank}: tag is {tag}, but tags go from 0 to {OWN_TAG - 1}")
    if not 0 <= peer < channel.size:
        raise UsageError(f"rank {channel.rank}: {name} is {peer}, but ranks go from 0 to {channel.size - 1}")
    if peer == channel.rank:
        raise UsageError(f"rank {channel.rank}: {name} is this rank itself, which would wait for itself for ever")
