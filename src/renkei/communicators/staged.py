"""As hierarchical, but what goes between nodes goes through host memory: for an MPI that can't read a GPU's."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from renkei.communicators.channel import Channel
from renkei.communicators.through_host import through_host
from renkei.communicators.two_level import TwoLevelCommunicator


@final
class StagedCommunicator(TwoLevelCommunicator):
    """Adds on GPUs within a node, and in host memory between nodes."""

    name = "staged"

    def _choose_num_slices(self, most: int) -> int:
        return 1

    def _add_between(self, channel: Channel, mine: Tensor) -> None:
        add = super()._add_between
        if mine.is_cuda:
            torch.cuda.current_stream(mine.device).synchronize()
        through_host(mine, lambda piece: add(channel, piece))
