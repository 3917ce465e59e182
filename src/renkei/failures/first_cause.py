"""Telling why a rank failed: to the launcher if it is ours, else to standard error; and which rank failed first."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from renkei.errors import LaunchError, PeerLostError, RenkeiError, UsageError
from renkei.launch.environments import detect

FAILED = threading.Event()  # set once this process has failed: nobody need be waited for any more
_LAST_WORDS = 0.3  # seconds for mpiexec to read what was said: when told to abort, it drops what it hasn't read
JOB_VARIABLE = "RENKEI_JOB"  # the folder in which a launcher on this host collects what its ranks report


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: which one.
        time: when, in seconds since the epoch.
        summary: the error in one line.
        details: its traceback, or what else is known; empty where the summary says it all.
        exit_code: what the process ends with.
        is_consequence: whether the rank failed because another had gone.
    """

    rank: int
    time: float
    summary: str
    details: str
    exit_code: int
    is_consequence: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """The failure that an exception is."""
        said_in_a_line = isinstance(error, (UsageError, PeerLostError))
        name = "" if said_in_a_line else f"{type(error).__name__}: "
        return cls(
            rank=rank,
            time=time.time(),
            summary=f"{name}{_text(error)}",
            details="" if said_in_a_line else "".join(traceback.format_exception(error)),
            exit_code=error.exit_code if isinstance(error, RenkeiError) else 1,
            is_consequence=isinstance(error, PeerLostError),
        )

    def __str__(self) -> str:
        if self.exit_code == 2 and not self.details:
            return f"renkei: {self.summary}"
        return f"{self.details}first cause: rank {self.rank} on {socket.gethostname()}: {self.summary}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's that can't even be told
        return "(its text can't be had: its __str__ raises)"


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure the others follow from: the earliest that isn't itself a consequence, if there is one."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time))


def report(error: BaseException) -> int:
    """Tell the launcher or standard error why this process ends; returns the exit code it is to end with."""
    FAILED.set()
    rank, job = _own_place()
    failure = Failure.of(error, rank)
    if job is None:
        print(failure, file=sys.stderr, flush=True)
    else:
        write(failure, job)
        if failure.rank != 0:  # goes to this rank's log; rank 0's is the console, where the launcher has the last word
            print(failure, file=sys.stderr, flush=True)
    return failure.exit_code


def _own_place() -> tuple[int, Path | None]:
    """This process's rank, and the folder where its launcher collects failures; None where that isn't ours."""
    job = os.environ.get(JOB_VARIABLE)
    rank, is_ours = 0, True
    with contextlib.suppress(LaunchError):  # perhaps the very error that is to be told
        environment = detect(os.environ)
        # an mpiexec that a rank of ours has started passes our variables on to ranks that aren't ours
        rank, is_ours = environment.rank, environment.launcher == "renkei"
    return rank, Path(job) if job is not None and is_ours else None


def write(failure: Failure, job: Path) -> None:
    """Leave a failure where the launcher looks for it."""
    partial = job / f".failure-{failure.rank}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(failure)))
    partial.rename(job / f"failure-{failure.rank}.json")


def read_all(job: Path) -> list[Failure]:
    """The failures left in a job's folder."""
    return [Failure(**json.loads(path.read_text())) for path in sorted(job.glob("failure-*.json"))]


def has_failures(job: Path) -> bool:
    """Whether any rank has left its failure in a job's folder."""
    return next(job.glob("failure-*.json"), None) is not None


def install() -> None:
    """Let an uncaught exception of the main thread end this process at once, where the launcher isn't ours.

    So the launcher and the other ranks notice. Python's own end would first wait for threads, and for this process's
    connections to be closed; it is left out, with all that is registered with `atexit`. Where MPI is in use, MPI_Abort
    ends the job, for ranks that have called MPI_Init would wait for this one in MPI_Finalize. The hook that was there
    before, a debugger's say, is called as well.
    """
    if threading.current_thread() is not threading.main_thread() or isinstance(sys.excepthook, _Hook):
        return
    sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    def __init__(self, earlier: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._earlier = earlier
        self._stderr = sys.stderr

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            self._earlier(kind, error, trace)
            return
        with contextlib.redirect_stderr(self._stderr):  # a hook of torch around this one keeps it until this returns
            exit_code = report(error)
        if self._earlier is not sys.__excepthook__:
            self._earlier(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it is broken, closed or None
                stream.flush()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            time.sleep(_LAST_WORDS)
            mpi.COMM_WORLD.Abort(exit_code)
        os._exit(exit_code)
