"""Ranks started by mpiexec, who meet through MPI, without any address given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from needs import MPIEXEC, mpich
from processes import HANG, finish, plain_environment, start

pytestmark = mpich

PROGRAM = r"""
import sys, torch, renkei
comm = renkei.create_communicator(timeout=20)
total = comm.all_reduce(torch.tensor(comm.rank))
if comm.rank == 2 and "fail" in sys.argv: 1 / 0
if "misuse" in sys.argv: comm.broadcast(total, root=7 if comm.rank == 1 else 0)
comm.barrier()
sys.stdout.write(f"total {int(total)} of {comm.size}\n")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return script


@pytest.fixture
def aborts() -> Iterator[None]:
    """For jobs that end by MPI_Abort: MPICH then leaves the name of its shared memory behind, whoever calls it."""
    memory = Path("/dev/shm")
    before = set(memory.glob("mpich_shm_*"))
    yield
    for left in set(memory.glob("mpich_shm_*")) - before:
        left.unlink()


def mpiexec(*arguments: str, **variables: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [str(MPIEXEC), *arguments[:-1], sys.executable, *arguments[-1].split()],
        env=plain_environment(**variables), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return finish([process], 2 * HANG)[0]


def test_ranks_meet_through_mpi(program: Path) -> None:
    code, output = mpiexec("-n", "3", str(program))
    assert code == 0, output
    assert output.count("total 3 of 3") == 3
    assert "3 ranks on 1 node, started by mpich" in output


def test_an_exception_ends_the_job_with_its_rank_and_traceback(program: Path, aborts: None) -> None:
    code, output = mpiexec("-n", "3", f"{program} fail")
    assert code != 0
    assert output.count("first cause: rank 2 on") == 1
    assert output.count("ZeroDivisionError: division by zero") >= 1
    assert output.count("Traceback") == 1
    assert "total" not in output


def test_wrong_usage_is_told_in_a_line_also_inside_a_rank_of_ours(program: Path, aborts: None, tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    ours = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ours |= {"RENKEI_JOB": str(job), "RENKEI_LISTEN_FD": "99"}  # as `renkei launch -n 1` would have set
    code, output = mpiexec("-n", "2", f"{program} misuse", **ours)
    assert code != 0
    assert "2 ranks on 1 node, started by mpich" in output
    assert not list(job.iterdir())
    assert "renkei: rank 1: broadcast: root is 7, but ranks go from 0 to 1" in output
    assert "Traceback" not in output


def test_without_mpi4py_it_is_told_what_to_install(program: Path, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')\n")
    results = finish([start(str(program), variables={"PMI_RANK": "0", "PMI_SIZE": "2", "PYTHONPATH": str(tmp_path)})])
    ((code, output),) = results
    assert code == 2
    assert "no mpi4py here" in output
    assert "pip install 'renkei[mpi]'" in output
