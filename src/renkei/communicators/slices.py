"""A sum in two halves: one rank adds each slice, then sends it to all.

Where a backend would add 16-bit floats in 16 bits, or in an order that depends on the number of ranks, its messages
only move bytes here, and what they bring is added as `summation` says. As many bytes travel as in a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from renkei.communicators.channel import Channel, Pending
from renkei.communicators.reduction import reduce_in_chunks
from renkei.communicators.stages import Stages
from renkei.communicators.summation import slices

PIECE = 2**22  # bytes; while one piece is being added another is on its way


def reduce_slices(channel: Channel, tensor: Tensor, num_slices: int, doing: str) -> None:
    """Replace slice r of a flat tensor, on rank r alone, by its sum over ranks; what other slices hold is left open.

    Ranks from `num_slices` on only give.
    """
    if channel.size == 1:
        return
    if channel.has_slices:
        channel.start_slices("reduce", tensor, num_slices, doing).wait()
        return
    pieces = slices(tensor, num_slices) + [tensor[:0]] * (channel.size - num_slices)
    mine = pieces[channel.rank]
    sizes = [piece.numel() for piece in pieces]
    parts = channel.all_to_all_split(tensor, sizes, [mine.numel()] * channel.size, doing)
    reduce_in_chunks(parts, [mine])


def gather_slices(channel: Channel, tensor: Tensor, num_slices: int, doing: str) -> None:
    """Replace each slice of a flat tensor, on all ranks, by that of the rank that has its sum."""
    if channel.size == 1:
        return
    if channel.has_slices:
        channel.start_slices("gather", tensor, num_slices, doing).wait()
        return
    pieces = enumerate(slices(tensor, num_slices))
    sent = [channel.start_broadcast(piece, root, doing) for root, piece in pieces if piece.numel()]
    for each in sent:
        each.wait()


def sum_by_slices(channel: Channel, tensor: Tensor, doing: str, piece: int = PIECE) -> None:
    """Replace a flat tensor by its sum over ranks, a piece of so many bytes after the other.

    What belongs to the next piece is on its way while one is being added.
    """
    if channel.size == 1:
        return
    if channel.has_slices or not channel.sends_at_once(tensor):
        reduce_slices(channel, tensor, channel.size, doing)
        gather_slices(channel, tensor, channel.size, doing)
        return
    exchanges = [_Exchange(channel, each, doing, at) for at, each in enumerate(tensor.split(piece // tensor.itemsize))]
    for exchange, following in zip(exchanges, (*exchanges[1:], None), strict=True):
        if exchange is exchanges[0]:
            exchange.give()
        if following is not None:
            following.give()
        exchange.add()
    for exchange in exchanges:
        exchange.end()


class _Exchange:
    """One piece on its way: slices to the ranks that add them, and sums back. Its own slice a rank keeps in place."""

    def __init__(self, channel: Channel, tensor: Tensor, doing: str, number: int) -> None:
        self._channel, self._doing = channel, doing
        self._slices = slices(tensor, channel.size)
        self._mine = self._slices[channel.rank]
        self._others = [other for other in range(channel.size) if other != channel.rank]
        self._tag = 2 * number
        self._received: list[Tensor] = []
        self._on_their_way: list[Pending] = []

    def give(self) -> None:
        """Begin to send the other ranks their slices, and to receive this rank's."""
        self._received = [torch.empty_like(self._mine) for _ in self._others]
        for other, part in zip(self._others, self._received, strict=True):
            self._recv(part, other, self._tag)
        for other in self._others:
            self._send(self._slices[other], other, self._tag)

    def add(self) -> None:
        """Add this rank's slices, and begin to send the sum to all."""
        self.end()
        parts = [*self._received[: self._channel.rank], self._mine, *self._received[self._channel.rank :]]
        reduce_in_chunks(parts, [self._mine])
        self._received = []
        for other in self._others:
            self._recv(self._slices[other], other, self._tag + 1)
            self._send(self._mine, other, self._tag + 1)

    def end(self) -> None:
        """Wait for all that is on its way."""
        on_their_way, self._on_their_way = self._on_their_way, []
        for each in on_their_way:
            each.wait()

    def _send(self, part: Tensor, other: int, tag: int) -> None:
        if part.numel():
            self._on_their_way.append(self._channel.start_send(part, other, tag, self._doing))

    def _recv(self, part: Tensor, other: int, tag: int) -> None:
        if part.numel():
            self._on_their_way.append(self._channel.start_recv(part, other, tag, self._doing))


class SumBySlices:
    """Sums of flat tensors over a channel of their own."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        self._stages = Stages("sum by slices", timeout)

    def start(self, tensor: Tensor, doing: str) -> Pending:
        """Begin to replace a tensor by its sum over ranks."""
        return self._stages.start(lambda: sum_by_slices(self._channel, tensor, doing))

    def close(self) -> None:
        """End; what has not been done fails."""
        self._stages.close()
