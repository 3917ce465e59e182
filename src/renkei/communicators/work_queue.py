"""Operations done one after the other, in the order given: on a thread of their own, or on that of whoever waits."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from renkei.errors import DeadlineError, RenkeiError, UsageError, afresh

_PATIENCE = 1.0  # seconds for what is being done to come to its end, when a line is closed or a deadline has passed
_BETWEEN_LOOKS = 0.005  # seconds
_LOOKS = 100  # before the thread sleeps until it is woken


class Operation:
    """Something that is done once: not yet, now, or already."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run
        self._callbacks: list[Callable[[], object]] | None = []
        self._guard = threading.Lock()
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has been done, or failed."""
        return self._callbacks is None

    def perform(self) -> None:
        """Do it."""
        assert self._run is not None
        try:
            self._run()
        except BaseException as error:
            self.error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        """It will not be done."""
        self.error = error
        self._end()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call back once it is done, on the thread that did it, or now."""
        with self._guard:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def await_end(self, seconds: float) -> bool:
        """Whether it came to its end within that time, on whichever thread."""
        if self.is_done:
            return True
        is_over = threading.Lock()
        is_over.acquire()
        self.when_done(is_over.release)
        return is_over.acquire(timeout=max(0.0, seconds))

    def _end(self) -> None:
        self._run = None  # and what it holds: tensors
        with self._guard:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()


class Transfer(NamedTuple):
    """A message on its way, and how to wait for it.

    Attributes:
        operation: ends when the message has left, or has come.
        wait: returns then, helping if it can, or raises; takes the seconds to wait at most.
        hurry: sees to it that the message moves although nobody waits.
        source: tells from which rank a message came, if that was left open.
    """

    operation: Operation
    wait: Callable[[float], None]
    hurry: Callable[[], None] = lambda: None
    source: Callable[[], int] | None = None


class WorkQueue:
    """A line of operations, done by a thread of its own or by whoever waits for one, if that comes first.

    Waking a thread takes longer than a short message does. So a thread that is not to be woken (`hurry`) looks by
    itself every few milliseconds as long as something is going on, and whoever waits in the meantime does the work.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: deque[Operation] = deque()
        self._turn = threading.Lock()  # held by whoever is doing the first in line
        self._bell = threading.Lock()  # released to wake the thread
        self._bell.acquire()
        self._num_submitted = 0
        self._is_asleep = False
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in line, nor being done."""
        return not self._line and not self._turn.locked()  # in this order: what leaves the line is being done

    def transfer(self, run: Callable[[], object], *, hurry: bool = True, limit: float = math.inf) -> Transfer:
        """Put an operation in line, as `submit` does, and tell how to wait for it.

        Args:
            limit: seconds after which it ends by itself; who waits for less must not be kept by doing it.
        """
        operation = self.submit(run, hurry=hurry)
        return Transfer(operation, lambda seconds: self.wait(operation, seconds, helps=seconds >= limit), self.ring)

    def submit(self, run: Callable[[], object], *, hurry: bool = True) -> Operation:
        """Put an operation in line, to be begun at once if in a hurry, else soon or when somebody waits for it."""
        if self._is_closed:
            raise UsageError(f"{self._name} is closed")
        operation = Operation(run)
        self._num_submitted += 1
        self._line.append(operation)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"renkei {self._name}", daemon=True)
            self._thread.start()
        elif hurry or self._is_asleep:
            self.ring()
        return operation

    def wait(self, operation: Operation, seconds: float, *, helps: bool = True) -> None:
        """Return when it is done; raise what it raised.

        Args:
            helps: whether it may be done here, which takes the time it takes.

        Raises:
            DeadlineError: it has not been done in time.
        """
        # What ends by itself tells better why, so it gets to speak first.
        deadline = time.monotonic() + seconds + (_PATIENCE if helps else 0.0)
        if not helps:
            self.ring()
        while not operation.is_done:
            if helps and self._turn.acquire(blocking=False):
                self._take_turn(operation)
            elif not operation.await_end(deadline - time.monotonic()):
                raise DeadlineError(f"timed out: {self._name} was not done after {seconds:g} s")
        if operation.error is not None:
            raise afresh(operation.error)

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(RuntimeError):  # it has been woken already
            self._bell.release()

    def close(self) -> None:
        """End the thread; what is still in line fails. What is being done gets a second to come to its end."""
        self._is_closed = True
        while self._line:
            with contextlib.suppress(IndexError):  # somebody is taking the last
                self._line.popleft().fail(RenkeiError(f"{self._name} was closed"))
        self.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)
        if self._turn.acquire(timeout=_PATIENCE):
            self._turn.release()

    def _work(self) -> None:
        quiet = seen = 0
        while not self._is_closed:
            quiet = quiet + 1 if self._num_submitted == seen and not self._line else 0
            seen = self._num_submitted
            if self._line and self._turn.acquire(blocking=False):
                self._take_turn(None)
            self._is_asleep = quiet > _LOOKS
            if self._is_asleep and self._line:  # submitted in this very moment
                continue
            self._bell.acquire(timeout=-1 if self._is_asleep else _BETWEEN_LOOKS)

    def _take_turn(self, last: Operation | None) -> None:
        """Do what is in line, up to `last`, and give the turn back."""
        try:
            while self._line:
                try:
                    operation = self._line.popleft()
                except IndexError:  # closed meanwhile
                    return
                operation.perform()
                if operation is last:
                    return
        finally:
            self._turn.release()
            if self._line:
                self.ring()
