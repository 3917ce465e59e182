"""Checks that every rank of an MPI job carries out, many in one job, since importing torch takes seconds.

A test file is the program, too: its `checks` run in the job that `run_job` starts, and each leaves what became of it,
on each rank, in a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import leaks
from needs import MPIEXEC, OPEN_MPI_LIBRARY, OPEN_MPIEXEC
from processes import finish, plain_environment

TESTS = Path(__file__).parent
JOB_ENDS_IN = 90.0  # seconds; generous, for what takes ten


@dataclass(frozen=True)
class Mpi:
    """An MPI to run a job with: how it is started, and what must be set."""

    command: tuple[str, ...]
    variables: Mapping[str, str]


MPICH = Mpi((str(MPIEXEC),), {})
OPEN_MPI = Mpi(
    (str(OPEN_MPIEXEC), "--oversubscribe"),
    {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPI4PY_LIBMPI": str(OPEN_MPI_LIBRARY),
    },
)


@dataclass(frozen=True)
class Job:
    """A job that has ended: its exit code, all it has written, and, by check, what became of it on each rank."""

    code: int
    output: str
    outcomes: Mapping[str, Sequence[str]]

    def assert_passed(self, check: str) -> None:
        """Every rank came to the end of a check."""
        outcomes = self.outcomes.get(check, ["did not run"])
        if set(outcomes) != {"passed"}:
            told = "\n".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))
            pytest.fail(f"{check}:\n{told}\nexit code {self.code}; the job wrote:\n{self.output}", pytrace=False)


@contextmanager
def aborting() -> Iterator[None]:
    """For jobs that end by MPI_Abort: MPICH then leaves the name of its shared memory behind, whoever calls it."""
    memory = Path("/dev/shm")
    before = set(memory.glob("mpich_shm_*"))
    yield
    for left in set(memory.glob("mpich_shm_*")) - before:
        if not leaks._belongs_to_somebody_else(f"name in /dev/shm: {left.name}"):
            left.unlink(missing_ok=True)


def start(mpi: Mpi, size: int, *program: str, **variables: str) -> subprocess.Popen[str]:
    """A running Python program of `size` ranks."""
    environment = plain_environment(PYTHONPATH=str(TESTS), **mpi.variables, **variables)
    return subprocess.Popen(
        [*mpi.command, "-n", str(size), sys.executable, *program],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(mpi: Mpi, size: int, *program: str, timeout: float = JOB_ENDS_IN, **variables: str) -> tuple[int, str]:
    """The exit code of a Python program of `size` ranks, and all it has written."""
    return finish([start(mpi, size, *program, **variables)], timeout)[0]


def run_job(mpi: Mpi, size: int, program: str, *arguments: str, **variables: str) -> Job:
    """Carry out the checks of a program."""
    with tempfile.TemporaryDirectory() as folder:
        return read_job(Path(folder), size, *run(mpi, size, program, folder, *arguments, **variables))


def read_job(folder: Path, size: int, code: int, output: str) -> Job:
    """What became of the checks of a job that has ended."""
    by_rank = [_read(folder / f"{rank}.jsonl") for rank in range(size)]
    names = dict.fromkeys(name for outcomes in by_rank for name in outcomes)
    return Job(code, output, {name: [outcomes.get(name, "did not run") for outcomes in by_rank] for name in names})


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def checks_of(*modules: ModuleType) -> dict[str, Callable[[], object]]:
    """The functions of modules whose names begin with ``check_``, by the rest of their names."""
    return {
        name.removeprefix("check_"): check
        for module in modules
        for name, check in vars(module).items()
        if name.startswith("check_")
    }


def carry_out(checks: Mapping[str, Callable[[], object]], rank: int, folder: str) -> None:
    """Run checks one after the other, up to the first that fails on this rank; the others then fail soon."""
    with Path(folder, f"{rank}.jsonl").open("w", buffering=1) as file:
        for name, check in checks.items():
            try:
                check()
            except BaseException:
                file.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise
            file.write(json.dumps([name, "passed"]) + "\n")
