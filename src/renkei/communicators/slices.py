"""A sum in two halves: one rank adds each slice, then sends it to all.

Where a backend would add 16-bit floats in 16 bits, or in an order that depends on the number of ranks, its messages
only move bytes here, and what they bring is added as `summation` says. As many bytes travel as in a ring.
"""

from __future__ import annotations

from torch import Tensor

from renkei.communicators.channel import Channel, Pending
from renkei.communicators.stages import Stages
from renkei.communicators.summation import add_in_tree, slices, widened

_PIECE = 2**22  # bytes; while one piece is being added another is on its way


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
    mine.copy_(add_in_tree(widened(parts)))


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


class SumBySlices:
    """Sums of flat tensors over a channel of their own."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        self._stages = Stages("sum by slices", timeout)

    def start(self, tensor: Tensor, doing: str) -> Pending:
        """Begin to replace a tensor by its sum over ranks."""
        return self._stages.start(lambda: self._run(tensor, doing))

    def close(self) -> None:
        """End; what has not been done fails."""
        self._stages.close()

    def _run(self, tensor: Tensor, doing: str) -> None:
        for piece in tensor.split(_PIECE // tensor.element_size()):
            reduce_slices(self._channel, piece, self._channel.size, doing)
            gather_slices(self._channel, piece, self._channel.size, doing)
