"""Each node's first rank adds its node's buffers, those add theirs, and hand the sum to their nodes."""

from __future__ import annotations

from typing import final

from renkei.communicators.two_level import TwoLevelCommunicator


@final
class HierarchicalCommunicator(TwoLevelCommunicator):
    """One rank of a node talks to other nodes: the fewest messages between them."""

    name = "hierarchical"

    def _choose_num_slices(self, most: int) -> int:
        return 1
