"""Starting ranks by mpiexec, for what talks over MPI and so can't be started by us."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from renkei.errors import UsageError

_PATIENCE = 30.0  # seconds for mpiexec to say its version


def start(command: Sequence[str], num_ranks: int) -> NoReturn:
    """Become the mpiexec that runs `command` on `num_ranks` ranks of this host.

    As it takes this process's place, who ends this ends the ranks, and its exit code is that of the first rank to fail.

    Raises:
        UsageError: there is no mpiexec, or it doesn't run.
    """
    mpiexec = find_mpiexec()
    is_open_mpi = says_open_mpi(_ask_version(mpiexec))
    arguments = command_line(mpiexec, num_ranks, command, is_open_mpi=is_open_mpi)
    variables = variables_for(is_open_mpi=is_open_mpi, is_root=hasattr(os, "geteuid") and os.geteuid() == 0)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(mpiexec, arguments, os.environ | variables)


def find_mpiexec() -> str:
    """The mpiexec beside this Python, whose packages bring the MPI that goes with it; else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise UsageError(
            f"this needs MPI, but there is no mpiexec in {beside.parent} nor on PATH; pip install 'renkei[mpi]', or "
            "install your system's MPI and mpi4py"
        )
    return found


def says_open_mpi(version: str) -> bool:
    """Whether what ``mpiexec --version`` says is Open MPI's; before version 5 it calls itself OpenRTE."""
    return "Open MPI" in version or "OpenRTE" in version


def command_line(mpiexec: str, num_ranks: int, command: Sequence[str], *, is_open_mpi: bool) -> list[str]:
    """How to run `command` on so many ranks, more than there are cores if need be, which others allow unasked."""
    return [mpiexec, *(["--oversubscribe"] if is_open_mpi else []), "-n", str(num_ranks), *command]


def variables_for(*, is_open_mpi: bool, is_root: bool) -> dict[str, str]:
    """What must be set: Open MPI runs nothing as root unless told twice."""
    if not (is_open_mpi and is_root):
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _ask_version(mpiexec: str) -> str:
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpiexec} doesn't run: {error}; reinstall it: pip install 'renkei[mpi]'") from None
    return done.stdout + done.stderr
