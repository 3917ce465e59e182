"""The backend "shared-memory-renkei" on processes of one host: every operation of torch.distributed."""

from __future__ import annotations

import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import renkei.communicators.backends as backends
from mpi_checks import groups, messages, movement, reductions, training
from needs import linux
from processes import HANG, finish, start
from under_mpi import TESTS, Job, carry_out, checks_of, read_job

pytestmark = linux

# Which look into MPI's transport, or at its words.
OF_MPI_ALONE = (
    "many_small_chunks",
    "ddp_trains_like_one_process_and_sends_while_it_computes",
    "red_twin_ddp_whose_sums_go_nowhere",
    "messages_of_other_lengths",
    "all_to_all_of_sizes_that_do_not_fit",  # told on all ranks here, and not on the one alone that sees it
)
CHECKS = {
    name: check
    for name, check in checks_of(reductions, movement, messages, groups, training).items()
    if name not in OF_MPI_ALONE
}


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest) -> Job:
    size = request.param
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(TESTS)}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(__file__, folder, variables=place | {"RANK": str(rank)}) for rank in range(size)]
        results = finish(ranks, 3 * HANG)
        code = max(abs(code) for code, _ in results)
        return read_job(Path(folder), size, code, "\n".join(output for _, output in results))


@pytest.mark.timeout(120)  # the first waits for the job
@pytest.mark.parametrize("check", CHECKS)
def test_in_shared_memory(job: Job, check: str) -> None:
    job.assert_passed(check)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    backends.register()
    dist.init_process_group("shared-memory-renkei", timeout=timedelta(seconds=30))
    carry_out(CHECKS, dist.get_rank(), folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
