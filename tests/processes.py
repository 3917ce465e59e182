"""Starting programs by hand, as a person or another launcher would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HANG = 30.0  # seconds; generous, for what takes a few, most of them importing torch

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "MPI_", "SLURM_", "TORCHELASTIC_", "RENKEI_")


def plain_environment(**variables: str) -> dict[str, str]:
    """This process's variables without any launcher's, and these."""
    ordinary = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return ordinary | {"OMP_NUM_THREADS": "1", "RENKEI_TUNING": ""} | variables


def start(*command: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A running Python program; standard error is read with standard output."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=plain_environment(**(variables or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = HANG) -> list[tuple[int, str]]:
    """Exit codes and outputs; processes that don't end in time are ended, and the test with them."""
    deadline = time.monotonic() + timeout
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, output))
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
    return results


def eventually(condition: Callable[[], object], timeout: float = HANG) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def read_pids(folder: Path, count: int) -> list[int]:
    """The process numbers that programs have left in a folder, one in each file, once all are there."""
    assert eventually(lambda: len(list(folder.glob("*.pid"))) == count)
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


# Writes this process's number where `read_pids` looks, under a name that begins with its rank.
LEAVE_PID = """
import os, pathlib
def leave_pid(folder, pid, name):
    partial = pathlib.Path(folder, f"{name}.partial")
    partial.write_text(str(pid))
    partial.rename(pathlib.Path(folder, f"{name}.pid"))
leave_pid(os.environ["PIDS"], os.getpid(), os.environ["RANK"])
"""
