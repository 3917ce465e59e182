"""One message per tensor: slow, obvious, and the oracle for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from renkei.communicators.channel import Pending
from renkei.communicators.communicator import Communicator


@final
class NaiveCommunicator(Communicator):
    """Adds tensor by tensor."""

    name = "naive"

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Begin as many messages as there are pieces."""
        return Pending([self._start_sum_of(piece, "gradient") for piece in pieces])
