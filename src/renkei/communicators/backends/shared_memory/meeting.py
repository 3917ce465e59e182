"""Waiting for the other ranks of a host without using the processor meanwhile."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from torch import Tensor

from renkei.communicators.backends.shared_memory.mesh import Mesh
from renkei.errors import DeadlineError, PeerLostError, afresh

_PATIENCE = 50e-6  # seconds


class Meeting:
    """A barrier in which each rank has a counter in the kernel (an eventfd) that the others raise.

    Raising a counter and reading it happen under one lock of the kernel, so what a rank has written before it came is
    seen by all that have met it, on every processor: no other fence is needed.

    Args:
        mesh: the connections; a rank that ends closes them, which ends the others' wait.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self._mesh, self._timeout = mesh, timeout
        self._own = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._others: dict[int, int] = {}
        for other in mesh.peers:
            mesh.send(other, b"counter", [self._own])
        for other in mesh.peers:
            _, (self._others[other],) = mesh.recv(other, 1)
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)
        self._by_descriptor = {connection.fileno(): other for other, connection in mesh.peers.items()}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, 0)  # only its end is of interest
        # To be woken takes longer than a short message does, so a rank stays awake a little where it takes no core from
        # others.
        self._patience = _PATIENCE if mesh.size <= len(os.sched_getaffinity(0)) else 0.0
        self._number = 0
        self._surplus = 0
        self._arrivals: list[memoryview] = []
        self._gone: set[int] = set()
        self._trouble: Exception | None = None

    def count_in(self, arrivals: Sequence[Tensor]) -> None:
        """Keep count of arrivals in shared memory, by rank one int64, so that it can be said who is missing."""
        self._arrivals = [each.numpy().data for each in arrivals]

    def wait(self, doing: str) -> None:
        """Return when every rank has come as often as this one.

        Raises:
            PeerLostError: a rank that has not come has ended.
            DeadlineError: some have not come in time.
        """
        if self._trouble is not None:
            raise afresh(self._trouble)
        self._number += 1
        if self._arrivals:
            self._arrivals[self._mesh.rank][0] = self._number
        for other in self._others.values():
            os.eventfd_write(other, 1)
        # One who comes again has met all others before, so what counts is the number of arrivals, not whose they are.
        missing = len(self._others) - self._surplus
        deadline = time.monotonic() + self._timeout
        try:
            while missing > 0:
                missing -= self._more(doing, deadline)
        except Exception as error:
            self._trouble = afresh(error)
            raise
        self._surplus = -missing

    def close(self) -> None:
        """Close the counters; nobody may be waiting here."""
        self._trouble = self._trouble or PeerLostError(f"rank {self._mesh.rank}: the group is closed")
        for descriptor in (self._own, *self._others.values()):
            os.close(descriptor)

    def _more(self, doing: str, deadline: float) -> int:
        """How many arrivals there are since the last look, after at least one, or one end, or the deadline."""
        for lost in self._gone:
            self._check_came(lost, doing)
        events = self._glance() or self._poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))
        for descriptor, _ in events:
            if descriptor == self._own:
                return os.eventfd_read(self._own)
        for descriptor, _ in events:
            self._poll.unregister(descriptor)
            self._gone.add(self._by_descriptor[descriptor])
        if not events:
            raise DeadlineError(
                f"rank {self._mesh.rank} waited {self._timeout:g} s in {doing} for {self._names()}; look at what they "
                "were doing"
            )
        return 0

    def _glance(self) -> list[tuple[int, int]]:
        """What comes within the next microseconds; nothing, at once, where ranks outnumber cores."""
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            if events := self._poll.poll(0):
                return events
            os.sched_yield()
        return []

    def _check_came(self, other: int, doing: str) -> None:
        """Raise unless a rank that has ended came to this meeting before."""
        if not self._arrivals or self._arrivals[other][0] < self._number:
            raise PeerLostError(
                f"rank {self._mesh.rank} lost rank {other} in {doing}: it failed or left early: see its log"
            )

    def _names(self) -> str:
        missing = [rank for rank, count in enumerate(self._arrivals) if count[0] < self._number]
        return f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}" if missing else "the other ranks"
