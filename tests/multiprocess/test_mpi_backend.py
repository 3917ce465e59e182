"""The backend "mpi-renkei" on ranks that mpiexec has started: every operation of torch.distributed."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import renkei.communicators.backends as backends
from mpi_checks import groups, messages, movement, red_twins, reductions, training
from needs import mpich, open_mpi
from under_mpi import MPICH, OPEN_MPI, Job, carry_out, checks_of, run_job

CHECKS = checks_of(reductions, movement, messages, groups, red_twins, training)
JOBS = [
    pytest.param((MPICH, 2), id="mpich-2", marks=mpich),
    pytest.param((MPICH, 3), id="mpich-3", marks=mpich),
    pytest.param((OPEN_MPI, 2), id="openmpi-2", marks=open_mpi),
]


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> Job:
    mpi, num_ranks = request.param
    return run_job(mpi, num_ranks, __file__)


@pytest.mark.timeout(120)  # the first waits for the job
@pytest.mark.parametrize("check", CHECKS)
def test_over_mpi(job: Job, check: str) -> None:
    job.assert_passed(check)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    backends.register()
    dist.init_process_group("mpi-renkei", init_method="renkei-mpi://", timeout=timedelta(seconds=30))
    carry_out(CHECKS, dist.get_rank(), folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
