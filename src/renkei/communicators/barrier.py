"""A barrier over the job's store: it touches no GPU, has a deadline, and says who is missing."""

from __future__ import annotations

import torch.distributed as dist

from renkei.communicators.channel import translate
from renkei.communicators.timeouts import is_timeout, milliseconds
from renkei.errors import DeadlineError

_OPEN = b"open"


class Barrier:
    """Counts arrivals. The verdict, open or failed, is written once, so that all ranks read the same one."""

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0

    def wait(self, timeout: float) -> None:
        """Return when every rank has come.

        Raises:
            DeadlineError: some have not come `timeout` seconds after this rank; raised on those that come later too.
            PeerLostError: the rank that holds the store has gone.
        """
        self._number += 1
        prefix = f"barrier/{self._number}"
        try:
            self._store.set(f"{prefix}/{self._rank}", "here")
            if self._store.add(f"{prefix}/count", 1) == self._size:
                self._store.compare_set(f"{prefix}/verdict", "", _OPEN.decode())
            verdict = self._await_verdict(prefix, timeout)
        except RuntimeError as error:
            raise translate(error, rank=self._rank, doing="barrier") from None
        if verdict != _OPEN:
            raise DeadlineError(verdict.decode())
        if self._rank == 0:
            self._sweep(self._number - 1)

    def _await_verdict(self, prefix: str, timeout: float) -> bytes:
        key = f"{prefix}/verdict"
        try:
            self._store.wait([key], milliseconds(timeout))
        except RuntimeError as error:
            if not is_timeout(str(error)):
                raise
            self._store.compare_set(key, "", self._verdict_after(timeout, prefix))
        return self._store.get(key)

    def _verdict_after(self, timeout: float, prefix: str) -> str:
        missing = [rank for rank in range(self._size) if not self._store.check([f"{prefix}/{rank}"])]
        if not missing:  # the last one came while this one looked at the clock
            return _OPEN.decode()
        names = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
        return (
            f"barrier number {self._number}: {names} had not come when rank {self._rank} had waited {timeout:g} s; "
            "look at what they were doing"
        )

    def _sweep(self, number: int) -> None:
        """Forget a barrier that all ranks have left, since all have come to the next."""
        for name in ("count", "verdict", *map(str, range(self._size))):
            self._store.delete_key(f"barrier/{number}/{name}")
