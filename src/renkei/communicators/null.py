"""No message at all: packs and unpacks, so that what communication costs can be told from what packing costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from renkei.communicators.channel import Pending
from renkei.communicators.communicator import Communicator


@final
class NullCommunicator(Communicator):
    """An instrument: each rank trains on its own samples alone."""

    name = "null"

    @property
    def num_addends(self) -> int:
        """This rank alone."""
        return 1

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Nothing is to be done."""
        self._channel.check_open()
        return Pending([])
