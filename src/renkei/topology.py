"""Where a rank stands: among all ranks, within its node, and among the nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The place of one rank.

    Attributes:
        rank, size: this process among all of them.
        intra_rank, intra_size: this process among those on its own node.
        inter_rank, inter_size: this process's node among the nodes.
    """

    rank: int
    size: int
    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int

    def __post_init__(self) -> None:
        for axis in ("", "intra_", "inter_"):
            rank, size = getattr(self, f"{axis}rank"), getattr(self, f"{axis}size")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}rank is {rank}, but must be at least 0 and below {axis}size, which is {size}")

    @classmethod
    def from_nodes(cls, rank: int, nodes: Sequence[Hashable]) -> Topology:
        """The topology of `rank` when rank i runs on node `nodes[i]`.

        Nodes are numbered in the order of their lowest rank and ranks within a node in the order of their global
        rank, as ChainerMN did, so any placement (by block, round-robin, uneven) gets consistent numbers.
        """
        mine = nodes[rank]
        order = list(dict.fromkeys(nodes))
        neighbours = [other for other, node in enumerate(nodes) if node == mine]
        return cls(
            rank=rank,
            size=len(nodes),
            intra_rank=neighbours.index(rank),
            intra_size=len(neighbours),
            inter_rank=order.index(mine),
            inter_size=len(order),
        )
