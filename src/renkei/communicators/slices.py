"""The two halves of a sum, by collectives: one rank adds each slice, then sends it to all.

Where a backend would add 16-bit floats in 16 bits, or in an order that depends on the number of ranks, its messages
only move bytes here, and what they bring is added as `summation` says. As many bytes travel as in a ring.
"""

from __future__ import annotations

from torch import Tensor

from renkei.communicators.channel import Channel
from renkei.communicators.reduction import reduce_in_chunks
from renkei.communicators.summation import slices


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
