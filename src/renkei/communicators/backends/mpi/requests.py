"""What MPI was told to do: moved along by who waits for it, or by a thread that looks after what nobody waits for."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from renkei.communicators.backends.mpi.farewells import Farewells
from renkei.communicators.backends.mpi.implementation import translate
from renkei.communicators.backends.mpi.pace import ALONE, EAGER, EAGER_BESIDE, LONG_NAP, NAP, Pace, give_way
from renkei.communicators.work_queue import Operation
from renkei.errors import DeadlineError, PeerLostError, RenkeiError, afresh

_QUIET = 1.0  # seconds in which nothing was begun nor moved until the thread's naps are long, or it sleeps
_GRACE = 0.3  # seconds in which what a rank sent before it left still comes

# From the ranks that have left, and after how many collectives, finds one that is needed.
FindLost = Callable[[Mapping[int, int]], int | None]


def nothing() -> None:
    """There is nothing more to be done."""


def keep_for_ever(*objects: Any) -> None:
    """Keep what MPI may still read or write, also while Python ends, for MPI ends after that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


class Requests:
    """What one rank has told MPI to do in one group and is not done.

    Args:
        mpi: the module `mpi4py.MPI`.
        rank: the rank.
        farewells: tell who has left.
    """

    def __init__(self, mpi: Any, rank: int, farewells: Farewells) -> None:
        self.mpi, self.rank, self.farewells = mpi, rank, farewells
        self._pending: dict[Request, None] = {}  # by age; keeps the memory that MPI uses
        self._num_begun = 0
        self._failed: Request | None = None  # the first collective that did
        self._bell = threading.Event()
        self._is_asleep = False
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, request: Request) -> None:
        """Look after a request from now on."""
        self._pending[request] = None
        self._num_begun += 1
        if self._is_asleep:
            self._bell.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="renkei mpi requests", daemon=True)
            self._thread.start()

    def end(self, request: Request) -> None:
        """Let go of one that is done."""
        self._pending.pop(request, None)

    def fail(self, request: Request) -> None:
        """Let go of one that has failed, and after which no collective can be complete on all ranks."""
        if request.number and (self._failed is None or request.number < self._failed.number):
            self._failed = request
        self.end(request)

    def check_intact(self) -> None:
        """Raise again what a collective has failed with."""
        if self._failed is not None:
            assert self._failed.error is not None
            raise afresh(self._failed.error)

    def list_collectives(self) -> list[Request]:
        """Those that aren't done, and the first that has failed."""
        return [*([self._failed] if self._failed else ()), *(each for each in list(self._pending) if each.number)]

    def give_up(self, error: RenkeiError) -> bool:
        """Let all of them fail; tells whether MPI, too, has done with them."""
        return all([request.give_up(error) for request in list(self._pending)])

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _look(self) -> None:
        pace, begun, seen = Pace(EAGER_BESIDE, 0.0), 0.0, 0
        while not self._is_closed:
            now = time.monotonic()
            unawaited = [request for request in list(self._pending) if not request.is_awaited]
            took = max([request.look(now) for request in unawaited], default=0.0)
            if seen != self._num_begun:
                seen, begun = self._num_begun, now
            if pace.nap_after(took):
                is_quiet = now - max(begun, pace.moved) > _QUIET
                self._is_asleep = is_quiet and not self._pending
                sleeps = self._is_asleep and not self._pending  # nothing was begun before it was known to be asleep
                self._bell.wait(None if sleeps else NAP if unawaited and not is_quiet else LONG_NAP)
                self._bell.clear()


class Request(Operation):
    """Something that MPI was told to do.

    Args:
        requests: which this is to be one of.
        request: MPI's, or what tests several of them.
        held: what MPI reads and writes.
        doing: what it is, for messages.
        find_lost: see `FindLost`.
        number: of a collective, from 1 in the order of beginning; 0 for what is none.
        finish: what is to be done once MPI has done its part.
        status: of what is received, for MPI to fill in.
        limit: seconds after which it fails, also if nobody waits.
    """

    def __init__(
        self,
        requests: Requests,
        request: Any,
        held: Any,
        doing: str,
        find_lost: FindLost,
        *,
        number: int = 0,
        finish: Callable[[], object] = nothing,
        status: Any = None,
        limit: float = math.inf,
    ) -> None:
        super().__init__(finish)
        self._requests, self._request, self._held, self._status = requests, request, held, status
        self._doing, self._find_lost, self._limit = doing, find_lost, limit
        self.number, self._begin = number, time.monotonic()
        self._lost_since: float | None = None
        self._turn = threading.Lock()
        self.is_awaited = False
        requests.begin(self)

    def wait(self, seconds: float) -> None:
        """Return when it is done; raise what it failed with.

        Raises:
            DeadlineError: it takes longer than so many seconds; it goes on, though, until its limit.
        """
        begin = time.monotonic()
        self.is_awaited = True
        try:
            self._wait_eagerly(begin)
            if not self.is_done:
                self._wait_patiently(begin, seconds)
        finally:
            self.is_awaited = False
        if self.error is not None:
            raise afresh(self.error)

    def look(self, now: float) -> float:
        """Move it along for somebody who doesn't wait; tells how many seconds of computing MPI took for that."""
        used = time.thread_time()
        self._advance()
        took = time.thread_time() - used
        self._check(now)
        return took

    def give_up(self, error: RenkeiError) -> bool:
        """Let it fail; tells whether MPI, too, has done with it."""
        if self.is_done:
            return True
        with self._turn:
            if self.is_done:
                return True
            is_over = self._cancel()
            if not is_over:
                keep_for_ever(self._request, self._held)
            self._fail(error)
            return is_over

    def _cancel(self) -> bool:
        """Let MPI forget it, if it can: what is received."""
        try:
            if self._status is not None:
                self._request.Cancel()
            is_over: bool = self._request.Test()
        except self._requests.mpi.Exception:
            return False
        return is_over

    def _wait_eagerly(self, begin: float) -> None:
        if self._turn.acquire(blocking=False):
            try:
                while not self.is_done and not self._try_to_end():
                    waited = time.monotonic() - begin
                    if waited > EAGER:
                        break
                    if waited > ALONE:
                        give_way()
            finally:
                self._turn.release()

    def _wait_patiently(self, begin: float, seconds: float) -> None:
        pace, checked = Pace(EAGER, begin), begin
        while not self.is_done:
            used = time.thread_time()
            self._advance()
            nap = pace.nap_after(time.thread_time() - used)
            now = time.monotonic()
            if now - checked > NAP:
                checked = now
                self._check(now)
                if now - begin > seconds and not self.is_done:
                    raise self._deadline_error(seconds)
            if nap:
                time.sleep(nap)
            else:
                give_way()

    def _advance(self) -> None:
        """Let MPI move it on, unless somebody else does."""
        if self._turn.acquire(blocking=False):
            try:
                if not self.is_done:
                    self._try_to_end()
            finally:
                self._turn.release()

    def _try_to_end(self) -> bool:
        """Ask MPI, and come to an end if it says so."""
        try:
            if not self._request.Test(self._status):
                return False
        except self._requests.mpi.Exception as error:
            keep_for_ever(self._request, self._held)
            self._fail(translate(self._requests.mpi, error, rank=self._requests.rank, doing=self._doing))
            return True
        self._held = None
        self._requests.end(self)
        self.perform()
        return True

    def _fail(self, error: RenkeiError) -> None:
        self._held = None
        self.error = error
        self._requests.fail(self)
        self.fail(error)

    def _check(self, now: float) -> None:
        """Give it up if it takes too long, or if a rank that is needed has left."""
        if self.is_done:
            return
        lost = self._find_lost(self._requests.farewells.look())
        self._lost_since = None if lost is None else self._lost_since or now
        if self._lost_since is not None and now - self._lost_since > _GRACE:
            who = f"rank {self._requests.rank} lost rank {lost} in {self._doing}"
            self.give_up(PeerLostError(f"{who}: it failed or left early: see its log"))
        elif now - self._begin > self._limit:
            self.give_up(self._deadline_error(self._limit))

    def _deadline_error(self, seconds: float) -> DeadlineError:
        waited = f"rank {self._requests.rank} waited {seconds:g} s for other ranks in {self._doing}"
        return DeadlineError(f"{waited}: timed out; do all ranks get there?")
