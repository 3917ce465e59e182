"""Sums that take several messages, one after the other, beside what their caller does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from renkei.communicators.channel import Pending
from renkei.communicators.cuda_streams import beside_computation
from renkei.communicators.work_queue import Transfer, WorkQueue


@dataclass(frozen=True)
class _Staged:
    """A sum on its way."""

    transfer: Transfer
    timeout: float

    def wait(self) -> None:
        """Return when it has come, or raise."""
        self.transfer.wait(self.timeout)


class Stages:
    """Does what it is given in that order, so that ranks who start the same sums send the same messages.

    Args:
        name: what is done, for messages.
        timeout: seconds that a message may wait for another rank.
    """

    _MESSAGES = 4  # that one sum may wait for, each up to the timeout, before its own wait gives up

    def __init__(self, name: str, timeout: float) -> None:
        self._line = WorkQueue(name)
        self._timeout = self._MESSAGES * timeout
        self._end = weakref.finalize(self, self._line.close)  # its thread would go on when nobody refers to this

    def start(self, run: Callable[[], None], device: torch.device) -> Pending:
        """Begin a sum of what is on such a device."""
        if device.type == "cuda":
            run = beside_computation(run, device)
        return Pending([_Staged(self._line.transfer(run), self._timeout)])

    def close(self) -> None:
        """End; what has not been done fails."""
        self._end()
