"""One message for the whole buffer, among the ranks of one node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import torch.distributed as dist
from torch import Tensor

from renkei.communicators.channel import Pending
from renkei.communicators.communicator import Communicator
from renkei.communicators.options import Options
from renkei.errors import UsageError


@final
class SingleNodeCommunicator(Communicator):
    """Adds the flat buffer at once; refuses to be made for several nodes."""

    name = "single_node"

    def __init__(self, store: dist.Store, *, rank: int, nodes: Sequence[Hashable], options: Options) -> None:
        if len(set(nodes)) > 1:
            raise UsageError(
                f"communicator 'single_node' is for the ranks of one node, but there are {len(set(nodes))} nodes; use "
                "'flat', 'hierarchical' or 'two_dimensional'"
            )
        super().__init__(store, rank=rank, nodes=nodes, options=options)

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Begin one message."""
        return self._start_sum_of(buffer, "gradient bucket")
