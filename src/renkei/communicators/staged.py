"""As hierarchical, but what goes between nodes goes through host memory: for an MPI that can't read a GPU's."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from renkei.communicators.channel import Channel
from renkei.communicators.two_level import TwoLevelCommunicator


@final
class StagedCommunicator(TwoLevelCommunicator):
    """Adds on GPUs within a node, and in host memory between nodes."""

    name = "staged"

    def _choose_num_slices(self, most: int) -> int:
        return 1

    def _add_between(self, channel: Channel, mine: Tensor) -> None:
        on_host = torch.empty(mine.shape, dtype=mine.dtype, device="cpu", pin_memory=mine.is_cuda)
        on_host.copy_(mine)
        super()._add_between(channel, on_host)
        mine.copy_(on_host)
