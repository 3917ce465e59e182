"""What a test may leave behind: nothing. Linux tells what there is in /proc; elsewhere only part of it is looked at."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 3.0  # seconds for what is already ending to end

# Set by pytest for each phase, by scikit-learn when it is imported, by torch when it first might compile.
_NOT_OURS = ("PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
_HELPERS_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "loky.backend")

_VARIABLE = "environment variable"
Snapshot = dict[str, set[str]]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `children` sees them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def take_snapshot() -> Snapshot:
    """All that a test could leave behind and that is there now."""
    return {kind: look() for kind, look in _LOOKS.items()}


def find_leaks(before: Snapshot, patience: float = _PATIENCE) -> list[str]:
    """What is there and wasn't `before`, once what is ending has had time to; one line each."""
    deadline = time.monotonic() + patience
    while leaks := _difference(before, take_snapshot()):
        gc.collect()  # a process group in a cycle, such as an exception and its traceback
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return [leak for leak in leaks if not _belongs_to_somebody_else(leak)]


def _difference(before: Snapshot, after: Snapshot) -> list[str]:
    gone = [f"environment variable gone: {each}" for each in before[_VARIABLE] - after[_VARIABLE]]
    return [f"{kind}: {each}" for kind in after for each in sorted(after[kind] - before[kind])] + gone


def end_children(before: Snapshot) -> None:
    """End the processes that weren't there `before`, lest they disturb the tests to come."""
    for child in children() - before["process"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child.split()[0]), signal.SIGKILL)


def reap_orphans() -> None:
    """Wait for the ended processes that nobody else waits for."""
    for child in _child_pids():
        if _state(child) == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def children() -> set[str]:
    """Running processes whose parent is this one: number and command line."""
    named = {f"{child} {command_line(child)}" for child in _child_pids() if is_running(child)}
    return {child for child in named if not any(helper in child for helper in _HELPERS_OF_PYTHON)}


def is_running(pid: int) -> bool:
    """Whether there is such a process and it hasn't ended."""
    return _state(pid) not in ("", "Z", "X")


def command_line(pid: int) -> str:
    """The words a process was started with; empty if it has ended."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def descendants(pid: int) -> set[int]:
    """The running processes that a process started, those they started, and so on."""
    found: set[int] = set()
    to_do = [pid]
    while to_do:
        new = set(_child_pids(to_do.pop())) - found
        found |= new
        to_do += new
    return {each for each in found if is_running(each)}


def _child_pids(pid: int | str = "self") -> Iterator[int]:
    for task in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            yield from map(int, task.read_text().split())


def _state(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _threads() -> set[str]:
    """Threads that hold up the end of the process, and all of Renkei's."""
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and (not thread.daemon or _runs_renkei(thread))
    }


def _runs_renkei(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith("renkei.")


def _environment() -> set[str]:
    return {f"{name}={value}" for name, value in os.environ.items() if name not in _NOT_OURS}


def _listening_ports() -> set[str]:
    """TCP ports that this process listens at."""
    own = set()
    for descriptor in _PROC.glob("self/fd/*"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in _PROC.glob("self/net/tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                ports.add(str(int(fields[1].rpartition(":")[2], 16)))
    return ports


def _shared_memory() -> set[str]:
    """All names but MPICH's, which leaves them when a job is aborted; that may have been by tests beside these."""
    names = os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else []
    return {name for name in names if not name.startswith("mpich_shm_")}


def _temporary_folders() -> set[str]:
    return {str(path) for path in Path(tempfile.gettempdir()).glob("renkei-*")}


_LOOKS: dict[str, Callable[[], set[str]]] = {
    "process": children,
    "thread": _threads,
    _VARIABLE: _environment,
    "listening port": _listening_ports,
    "name in /dev/shm": _shared_memory,
    "temporary folder": _temporary_folders,
}


def _belongs_to_somebody_else(leak: str) -> bool:
    """Whether a name in /dev/shm is in use by a process that no test started."""
    kind, _, name = leak.partition(": ")
    if kind != "name in /dev/shm":
        return False
    ours = {os.getpid(), *descendants(os.getpid())}
    for maps in _PROC.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if int(maps.parent.name) not in ours and f"{_SHARED_MEMORY}/{name}" in maps.read_text():
                return True
    return False


def eventually_ended(pids: Iterable[int], patience: float = 10.0) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + patience
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
