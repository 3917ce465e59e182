"""What goes wrong with the backend "mpi-renkei" is told on all ranks that are there, soon, and ends the job."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import renkei.communicators.backends as backends
from mpi_checks import waiting
from needs import mpich, open_mpi
from processes import finish, start
from under_mpi import MPICH, OPEN_MPI, Job, Mpi, aborting, carry_out, checks_of, run, run_job

pytestmark = [mpich, pytest.mark.timeout(120)]  # the first waits for a job of many checks
CHECKS = checks_of(waiting)
JOBS = [pytest.param(MPICH, id="mpich"), pytest.param(OPEN_MPI, id="openmpi", marks=open_mpi)]
BEGIN = """
import sys, time
import torch, torch.distributed as dist
import renkei.communicators.backends
dist.init_process_group("mpi-renkei", init_method="renkei-mpi://")
"""
ON_ITS_WAY = r"""
tensor = torch.ones(3)
dist.all_reduce(tensor)
works = [dist.all_reduce(torch.ones(2**20), async_op=True) for _ in range(5)]
works.append(dist.irecv(torch.ones(3), 1 - dist.get_rank()))
sys.stdout.write(f"total {tensor.tolist()}\n")
sys.stdout.flush()
"""
FAILS = """
if dist.get_rank() == 1:
    time.sleep(0.5)
    raise ValueError("no luck")
dist.all_reduce(torch.ones(2**20))
"""
TOO_FEW_THREADS = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
"""
BY_VARIABLES = """
import torch.distributed as dist
import renkei.communicators.backends
from renkei.failures import first_cause
first_cause.install()
dist.init_process_group("mpi-renkei")
"""


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> Job:
    return run_job(request.param, 3, __file__)


@pytest.mark.parametrize("check", CHECKS)
def test_over_mpi(job: Job, check: str) -> None:
    job.assert_passed(check)
    assert job.code == 0, job.output


@pytest.fixture
def aborts() -> Iterator[None]:
    with aborting():
        yield


@pytest.mark.parametrize("mpi", JOBS)
@pytest.mark.parametrize("at_end", ["", "dist.destroy_process_group()"], ids=["as it is", "destroyed"])
def test_a_process_ends_cleanly_with_operations_on_their_way(mpi: Mpi, at_end: str) -> None:
    code, output = run(mpi, 2, "-c", BEGIN + ON_ITS_WAY + at_end)
    assert code == 0, output
    assert output.splitlines() == ["total [2.0, 2.0, 2.0]"] * 2


@pytest.mark.parametrize("mpi", JOBS)
def test_an_exception_ends_the_job_with_its_rank_and_traceback(mpi: Mpi, aborts: None) -> None:
    begin = time.monotonic()
    code, output = run(mpi, 2, "-c", BEGIN + FAILS)
    assert code != 0
    assert time.monotonic() - begin < 30
    assert output.count("first cause: rank 1 on") == 1
    assert output.count("ValueError: no luck") >= 1
    assert output.count("Traceback") == 1


def test_a_process_without_mpiexec_is_a_group_of_one() -> None:
    ((code, output),) = finish([start("-c", BEGIN + "print(dist.get_world_size())")])
    assert (code, output) == (0, "1\n")


def test_ranks_that_another_launcher_has_started_are_told(aborts: None) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start("-c", BY_VARIABLES, variables={"RANK": str(rank), **variables}) for rank in range(2)]
    for code, output in finish(ranks):
        assert code == 2, output
        assert "renkei: rank 0: MPICH" in output
        assert "sees 1 of 2 ranks: they were not started by its mpiexec; start them by mpiexec -n 2" in output


@open_mpi
def test_two_mpis_in_one_environment_are_named(aborts: None) -> None:
    """MPICH gives up when Open MPI has started it; Open MPI takes each process that MPICH has started for the first."""
    its_own = {name: value for name, value in OPEN_MPI.variables.items() if name != "MPI4PY_LIBMPI"}
    code, output = run(Mpi(OPEN_MPI.command, its_own), 2, "-c", BEGIN)
    assert code != 0
    said = r"Open MPI's mpiexec has started this process \(OMPI_COMM_WORLD_SIZE=2\), but mpi4py has loaded MPICH 5.*so"
    assert re.search(said, output), output
    code, output = run(Mpi(MPICH.command, OPEN_MPI.variables), 2, "-c", BEGIN)
    assert code != 0
    said = r"renkei: Open MPI 4.*so.*, which mpi4py has loaded, sees 1 of 2 ranks, but the mpiexec .*\(PMI_SIZE=2\)"
    assert re.search(said, output), output
    assert "Traceback" not in output


def test_too_low_a_level_of_threads_is_told(aborts: None) -> None:
    ((code, output),) = finish([start("-c", TOO_FEW_THREADS + BEGIN)])
    assert code == 2
    assert "MPI was begun with MPI_THREAD_SERIALIZED, but MPI_THREAD_MULTIPLE is needed" in output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main(folder: str) -> None:
    torch.set_num_threads(1)
    backends.register()
    dist.init_process_group("mpi-renkei", init_method="renkei-mpi://", timeout=timedelta(seconds=30))
    carry_out(CHECKS, dist.get_rank(), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
