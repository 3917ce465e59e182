"""Sums in two levels: within each node, where talking is cheap, and between nodes, where it is not.

    within a node        between nodes        within a node
    reduce to slices  →  sum of each slice →  gather the slices

The ranks of a node that add a slice are its first ones, as many as the node with the fewest ranks has at most; so
nodes may have different numbers of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators.channel import Channel, Pending
from renkei.communicators.communicator import Communicator
from renkei.communicators.options import Options
from renkei.communicators.slices import gather_slices, reduce_slices
from renkei.communicators.stages import Stages
from renkei.communicators.sum_by_slices import coded_sum, sum_by_slices
from renkei.communicators.summation import ADDED_IN_32_BITS, slices
from renkei.gradients.compression.codec import Codec


class TwoLevelCommunicator(Communicator):
    """Adds flat buffers within each node, and then between nodes."""

    def __init__(self, store: dist.Store, *, rank: int, nodes: Sequence[Hashable], options: Options) -> None:
        super().__init__(store, rank=rank, nodes=nodes, options=options)
        self._num_slices = self._choose_num_slices(min(Counter(nodes).values()))
        neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        self._within = self._network.open(f"within/{self.inter_rank}", neighbours, options.backend_within)
        self._between: Channel | None = None
        if self.intra_rank < self._num_slices and self.inter_size > 1:
            self._between = self._network.open(f"between/{self.intra_rank}", _column(nodes, self.intra_rank))
        self._stages = Stages(f"{self.name} sum", options.timeout)

    @abstractmethod
    def _choose_num_slices(self, most: int) -> int:
        """Into how many slices a buffer is cut, one for each rank of a node that talks to other nodes."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer that the ranks of this node add in place, if they share memory."""
        return self._within.allocate(numel, dtype, device)

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Begin the three stages."""
        self._channel.check_open()
        return self._stages.start(lambda: self._add(buffer), buffer.device)

    def _start_coded_sum(self, buffer: Tensor, codec: Codec, owed: Tensor | None) -> Pending:
        """Begin the three stages, of which only the one between nodes is coded."""
        return self._stages.start(lambda: self._add(buffer, codec, owed), buffer.device)

    def start_sums(self, run: Callable[[Callable[[Tensor], None]], None], device: torch.device) -> Pending:
        """Begin, each sum in three stages."""
        self._channel.check_open()
        return self._stages.start(lambda: run(self._add), device)

    def prepare_compressed_sums(self) -> None:
        """There is nothing more to connect."""

    def _add(self, buffer: Tensor, codec: Codec | None = None, owed: Tensor | None = None) -> None:
        reduce_slices(self._within, buffer, self._num_slices, f"{self.name} sum within the node")
        if self._between is not None:
            mine = slices(buffer, self._num_slices)[self.intra_rank]
            if codec is None:
                self._add_between(self._between, mine)
            else:
                of_mine = None if owed is None else slices(owed, self._num_slices)[self.intra_rank]
                coded_sum(self._between, mine, codec, of_mine, f"{self.name} coded sum between nodes")
        gather_slices(self._within, buffer, self._num_slices, f"{self.name} sum within the node")

    def _add_between(self, channel: Channel, mine: Tensor) -> None:
        doing = f"{self.name} sum between nodes"
        if mine.dtype in ADDED_IN_32_BITS and not channel.adds_16_bits_in_32:
            sum_by_slices(channel, mine, doing)
        else:
            channel.start_reduction(mine, "sum", doing).wait()

    def close(self) -> None:
        """Drop the connections, and those of all communicators made from this one."""
        super().close()
        self._stages.close()


def _column(nodes: Sequence[Hashable], at: int) -> list[int]:
    """Of each node, the rank that is number `at` among its ranks."""
    by_node: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return sorted(ranks[at] for ranks in by_node.values())
