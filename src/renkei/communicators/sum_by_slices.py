"""A sum in two halves over messages from rank to rank: while one piece is being added, the next is on its way.

give                         add                                  end
each rank its slice     →    add what came, give the sum     →    take the others' sums
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from renkei.communicators.channel import Channel, Pending
from renkei.communicators.coding import AsTheyAre, Coded, Coding, Part
from renkei.communicators.reduction import reduce_in_chunks
from renkei.communicators.slices import gather_slices, reduce_slices
from renkei.communicators.stages import Stages
from renkei.gradients.compression.codec import Codec

PIECE = 2**22  # bytes, before any coding


def sum_by_slices(channel: Channel, tensor: Tensor, doing: str, piece: int = PIECE) -> None:
    """Replace a flat tensor by its sum over ranks, a piece of so many bytes after the other."""
    if channel.size == 1:
        return
    if channel.has_slices or not channel.sends_at_once(tensor):
        reduce_slices(channel, tensor, channel.size, doing)
        gather_slices(channel, tensor, channel.size, doing)
    else:
        _exchange(channel, tensor, AsTheyAre(), doing, piece)


def coded_sum(
    channel: Channel, tensor: Tensor, codec: Codec, owed: Tensor | None, doing: str, piece: int = PIECE
) -> None:
    """The same, of floats that travel coded. All ranks get the same bits.

    A rank's own slice, and what it got of it, isn't coded before the sum is.

    Args:
        owed: fp32, as long as the tensor: becomes, where this rank sends messages, what is lost of them. So the sum and
            what all ranks owe are together what they gave.
    """
    if channel.size == 1:
        return
    coding = Coded(codec, owed)
    if channel.has_slices or not channel.sends_at_once(tensor):
        _exchange_together(channel, tensor, coding, doing)
    else:
        _exchange(channel, tensor, coding, doing, piece)


def _exchange(channel: Channel, tensor: Tensor, coding: Coding, doing: str, piece: int) -> None:
    length = max(1, piece // tensor.itemsize)
    parts = [coding.cut(each, at * length, channel.size) for at, each in enumerate(tensor.split(length))]
    exchanges = [_Exchange(channel, each, doing, at) for at, each in enumerate(parts)]
    for exchange, following in zip(exchanges, (*exchanges[1:], None), strict=True):
        if exchange is exchanges[0]:
            exchange.give()
        if following is not None:
            following.give()
        exchange.add()
    for exchange in exchanges:
        exchange.end()


def _exchange_together(channel: Channel, tensor: Tensor, coding: Coding, doing: str) -> None:
    """The whole tensor by collectives, where a rank can't send to all others and receive from them at the same time."""
    parts = coding.cut(tensor, 0, channel.size)
    mine = parts[channel.rank]
    given = [part.give() if part is not mine else mine.room()[:0] for part in parts]
    expected = [mine.room().numel() if other != channel.rank else 0 for other in range(channel.size)]
    received = channel.all_to_all_split(torch.cat(given), [each.numel() for each in given], expected, doing)
    _add(mine, received, channel.rank)
    sums = [part.room_for_sum() if part is not mine else mine.give_sum() for part in parts]
    on_their_way = [channel.start_broadcast(each, root, doing) for root, each in enumerate(sums) if each.numel()]
    for each in on_their_way:
        each.wait()
    for part, data in zip(parts, sums, strict=True):
        if part is not mine:
            part.take_sum(data)


def _add(mine: Part, received: list[Tensor], rank: int) -> None:
    """Add what came from ranks, in their order, to this rank's own, which isn't looked at among them."""
    parts = [mine.values if other == rank else mine.read(data) for other, data in enumerate(received)]
    reduce_in_chunks(parts, [mine.values])


class _Exchange:
    """One piece on its way: slices to the ranks that add them, and sums back. Its own slice a rank keeps in place."""

    def __init__(self, channel: Channel, parts: list[Part], doing: str, number: int) -> None:
        self._channel, self._doing, self._parts = channel, doing, parts
        self._mine = parts[channel.rank]
        self._others = [other for other in range(channel.size) if other != channel.rank]
        self._tag = 2 * number
        self._received: list[Tensor] = []
        self._on_their_way: list[Pending] = []

    def give(self) -> None:
        """Begin to send the other ranks their slices, and to receive this rank's."""
        self._received = [self._mine.room() for _ in self._parts]
        for other in self._others:
            self._recv(self._received[other], other, self._tag)
        for other in self._others:
            self._send(self._parts[other].give(), other, self._tag)

    def add(self) -> None:
        """Add this rank's slices, and begin to send the sum to all."""
        self._wait()
        _add(self._mine, self._received, self._channel.rank)
        total = self._mine.give_sum()
        self._received = [part.room_for_sum() for part in self._parts]
        for other in self._others:
            self._recv(self._received[other], other, self._tag + 1)
            self._send(total, other, self._tag + 1)

    def end(self) -> None:
        """Wait for all sums, and take them."""
        self._wait()
        for other in self._others:
            self._parts[other].take_sum(self._received[other])
        self._received = []

    def _wait(self) -> None:
        on_their_way, self._on_their_way = self._on_their_way, []
        for each in on_their_way:
            each.wait()

    def _send(self, data: Tensor, other: int, tag: int) -> None:
        if data.numel():
            self._on_their_way.append(self._channel.start_send(data, other, tag, self._doing))

    def _recv(self, data: Tensor, other: int, tag: int) -> None:
        if data.numel():
            self._on_their_way.append(self._channel.start_recv(data, other, tag, self._doing))


class SumBySlices:
    """Sums of flat tensors over a channel of their own."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        self._stages = Stages("sum by slices", timeout)

    def start(self, tensor: Tensor, doing: str) -> Pending:
        """Begin to replace a tensor by its sum over ranks."""
        return self._stages.start(lambda: sum_by_slices(self._channel, tensor, doing), tensor.device)

    def start_coded(self, tensor: Tensor, codec: Codec, owed: Tensor | None, doing: str) -> Pending:
        """Begin to replace a tensor by its sum over ranks, which travels coded."""
        return self._stages.start(lambda: coded_sum(self._channel, tensor, codec, owed, doing), tensor.device)

    def start_several(self, run: Callable[[Callable[[Tensor], None]], None], device: torch.device) -> Pending:
        """Begin what takes several sums; `run` is given what replaces a flat tensor by its sum over ranks."""

        def add(tensor: Tensor) -> None:
            self._channel.start_reduction(tensor, "sum", "compressed gradient bucket").wait()

        return self._stages.start(lambda: run(add), device)

    def close(self) -> None:
        """End; what has not been done fails."""
        self._stages.close()
