"""Starting the ranks of a job on this host, and ending all of them when one fails."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from renkei.errors import RankFailedError, UsageError
from renkei.failures.first_cause import JOB_VARIABLE, Failure, first_cause, has_failures, read_all
from renkei.launch.child import LAUNCHER_VARIABLE
from renkei.launch.environments import without_place
from renkei.launch.rendezvous import LISTENER_VARIABLE

_THREADS = re.compile(r"[1-9]\d*(,[1-9]\d*)*")  # what OpenMP takes: a number, or one for each level of nesting
_POLL = 0.02  # seconds between looks at the ranks
_LAST_WORDS = 1.0  # seconds for the other ranks to notice a failure by themselves
_LEAVING = 8.0  # seconds for a rank that others say is gone to be gone
_TERMINATION = 3.0  # seconds from SIGTERM to SIGKILL


def launch(command: Sequence[str], num_ranks: int, *, log_dir: Path | None = None) -> Failure | None:
    """Run `command` (for `renkei.launch.child`) on `num_ranks` ranks; returns the first failure, None if all went well.

    Rank 0 writes to this process's standard output and error; what the others write goes to files in `log_dir`.
    """
    with job_folder() as job:
        return run_ranks(command, num_ranks, job=job, log_dir=log_dir or job)


def run(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call ``fn(*args)`` in `num_ranks` new processes on this host; returns their results by rank.

    Works from a script, a notebook or an interactive session; `fn` may be a closure. Inside it,
    `renkei.create_communicator()` finds the other ranks.

    Raises:
        UsageError: `fn` raised it, on any rank, or `num_ranks` is not at least 1.
        RankFailedError: `fn` raised something else, or a process ended; carries the first failure's traceback.
    """
    import cloudpickle

    with job_folder() as job:
        # what cloudpickle writes names modules, which are to be found there where they are here
        (job / "function.pkl").write_bytes(pickle.dumps((sys.path, cloudpickle.dumps((fn, args)))))
        failure = run_ranks(["function"], num_ranks, job=job, log_dir=job, relay=True)
        if failure is not None:
            if failure.exit_code == 2 and not failure.details:
                raise UsageError(failure.summary)
            raise RankFailedError(
                f"rank {failure.rank} failed: {failure.summary}\n{failure.details}",
                rank=failure.rank,
                traceback_text=failure.details,
            )
        return [_result(job, rank) for rank in range(num_ranks)]


def _result(job: Path, rank: int) -> Any:
    path = job / f"result-{rank}.pkl"
    if not path.exists():
        raise RankFailedError(f"rank {rank} ended without a result: the function left the process", rank=rank)
    return pickle.loads(path.read_bytes())


def threads_per_rank(num_ranks: int) -> int:
    """Cores this process may use, divided among the ranks; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


@contextmanager
def job_folder() -> Iterator[Path]:
    """A private folder for what the ranks of a job leave for their launcher; gone afterwards."""
    job = Path(tempfile.mkdtemp(prefix="renkei-"))
    try:
        yield job
    finally:
        shutil.rmtree(job, ignore_errors=True)


def run_ranks(
    command: Sequence[str], num_ranks: int, *, job: Path, log_dir: Path, relay: bool = False
) -> Failure | None:
    """Start the ranks, wait for them, and return the first failure if there was one.

    Args:
        relay: write what rank 0 prints to ``sys.stdout``, which in a notebook is not the process's standard output.
    """
    if num_ranks < 1:
        raise UsageError(f"the number of ranks is {num_ranks}, but must be at least 1")
    ranks: list[subprocess.Popen[bytes]] = []
    with _termination_raises(), ExitStack() as stack:
        try:
            with _reserved_port() as reservation:
                for rank in range(num_ranks):
                    ranks.append(_start(command, rank, num_ranks, job, log_dir, reservation, relay))
            if ranks[0].stdout is not None:
                stack.enter_context(_relayed(ranks[0].stdout))
            return _wait(ranks, job, log_dir)
        finally:
            _end(ranks)


def _start(
    command: Sequence[str],
    rank: int,
    num_ranks: int,
    job: Path,
    log_dir: Path,
    reservation: socket.socket,
    relay: bool,
) -> subprocess.Popen[bytes]:
    address, port = reservation.getsockname()
    variables = without_place(os.environ)
    if not _THREADS.fullmatch(variables.get("OMP_NUM_THREADS", "")):  # else each rank would take all the cores
        variables["OMP_NUM_THREADS"] = str(threads_per_rank(num_ranks))
    variables |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), JOB_VARIABLE: str(job)}
    variables |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), LAUNCHER_VARIABLE: str(os.getpid())}
    arguments = [sys.executable, "-m", "renkei.launch.child", *command]
    if rank == 0:
        variables[LISTENER_VARIABLE] = str(reservation.fileno())
        return subprocess.Popen(
            arguments,
            env=variables,
            stdout=subprocess.PIPE if relay else None,
            pass_fds=[reservation.fileno()],
            start_new_session=True,
        )
    log_dir.mkdir(parents=True, exist_ok=True)
    with (log_dir / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            arguments, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], job: Path, log_dir: Path) -> Failure | None:
    all_well = now = time.time()
    # a rank that has reported a failure may be long in leaving: messages on their way hold it up
    while not any([rank.poll() for rank in ranks]) and not has_failures(job):
        if all(rank.returncode == 0 for rank in ranks):
            return None
        time.sleep(_POLL)
        all_well, now = now, time.time()
    fallen = {number for number, rank in enumerate(ranks) if rank.returncode}
    begin = time.monotonic()
    while any([rank.poll() is None for rank in ranks]):
        if time.monotonic() - begin > (_LAST_WORDS if _is_explained(ranks, job) else _LEAVING):
            break
        time.sleep(_POLL)
    failures = read_all(job)
    told = {failure.rank for failure in failures}
    all_complain = all(failure.is_consequence for failure in failures)
    # a rank that fell without a word did so before those that tell of it
    failures += [
        _untold(number, rank.returncode, log_dir, all_well if number in fallen | _killed(ranks) else time.time())
        for number, rank in enumerate(ranks)
        if number not in told and (rank.returncode or (rank.returncode == 0 and all_complain and not fallen - told))
    ]
    return first_cause(failures)


def _is_explained(ranks: Sequence[subprocess.Popen[bytes]], job: Path) -> bool:
    """Whether more is known than that some ranks complain of another: that one may be long in leaving."""
    failures = read_all(job)
    told = {failure.rank for failure in failures}
    fell = any(rank.returncode for number, rank in enumerate(ranks) if number not in told)
    return fell or not all(failure.is_consequence for failure in failures)


def _killed(ranks: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """The ranks ended by a signal from outside: no other rank's end does that, nor has this launcher yet.

    A process's connections are closed a moment before its parent can see that it has ended, so the others may tell of
    it first. SIGABRT is left out: libraries raise it themselves when another rank has gone.
    """
    codes = {number: rank.returncode or 0 for number, rank in enumerate(ranks)}
    return {number for number, code in codes.items() if code < 0 and code != -signal.SIGABRT}


def _untold(rank: int, returncode: int, log_dir: Path, at: float) -> Failure:
    """The failure of a rank that could not report it."""
    if returncode < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-returncode, "unnamed")
        summary = f"ended by signal {-returncode} ({name})"
    elif returncode:
        summary = f"exited with code {returncode}"
    else:
        summary = "ended, with exit code 0, while others waited for it; every rank must take equally many steps"
    log = log_dir / f"rank-{rank}.log"
    last_words = log.read_text(errors="replace").splitlines(keepends=True)[-30:] if log.exists() else []
    return Failure(rank, at, summary, "".join(last_words), exit_code=max(1, returncode))


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, and what it has started: politely, then not."""
    for rank in ranks:
        if rank.poll() is None:
            _signal_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATION
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for rank in ranks:
        _signal_group(rank, signal.SIGKILL)
        rank.wait()


def _signal_group(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the rank and all it started have ended
        os.killpg(rank.pid, number)


@contextmanager
def _reserved_port() -> Iterator[socket.socket]:
    """A port of the loopback interface that no other process gets.

    The socket is bound but doesn't listen: rank 0 inherits it and will, while a plain ``init_process_group`` there can
    still bind the same port itself, for both set SO_REUSEADDR.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation


@contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM ends this process through its ``finally`` clauses, so that the ranks don't outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _relayed(source: IO[bytes]) -> Iterator[None]:
    """Until the source ends, what it says is written to ``sys.stdout``; on leaving, all of it has been."""

    def relay() -> None:
        with source:
            for line in source:
                sys.stdout.write(line.decode(errors="replace"))

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_LAST_WORDS)
