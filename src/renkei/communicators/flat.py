"""One message for the whole buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from renkei.communicators.channel import Pending
from renkei.communicators.communicator import Communicator


@final
class FlatCommunicator(Communicator):
    """Adds the flat buffer at once."""

    name = "flat"

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Begin one message."""
        return self._start_sum_of(buffer, "gradient bucket")
