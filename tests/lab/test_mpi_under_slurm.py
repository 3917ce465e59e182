"""The backend "mpi-renkei" on ranks that srun has started, who meet over Slurm's own protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.slurm import Slurm
from needs import mpich
from under_mpi import aborting

PROGRAM = r"""
import sys, torch, torch.distributed as dist
import renkei.communicators.backends
dist.init_process_group("mpi-renkei", init_method="renkei-mpi://")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
if "fail" in sys.argv and dist.get_rank() == 2: raise ValueError("no luck on rank 2")
dist.barrier()
sys.stdout.write(f"total {total.item():g} of {dist.get_world_size()}\n")
dist.destroy_process_group()
"""
pytestmark = mpich


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(Path(f"/tmp/renkei-slurm-mpi-{tmp_path_factory.mktemp('slurm').parent.name}"), num_nodes=2) as two_nodes:
        yield two_nodes


@pytest.fixture
def program(tmp_path: Path) -> str:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return str(script)


def test_srun_of_three_tasks_on_two_nodes(slurm: Slurm, program: str) -> None:
    done = slurm.run("srun", "--mpi=pmi2", "-N2", "-n3", sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["total 3 of 3"] * 3


def test_without_a_protocol_it_is_told_what_to_try(slurm: Slurm, program: str) -> None:
    with aborting():
        done = slurm.run("srun", "--mpi=none", "-N2", "-n3", sys.executable, program)
    assert done.returncode != 0
    assert "sees 1 of 3 ranks, but srun has started them (SLURM_STEP_NUM_TASKS=3)" in done.stderr
    assert "srun --mpi=pmi2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failing_task_ends_the_step_and_says_why(slurm: Slurm, program: str) -> None:
    with aborting():
        done = slurm.run("srun", "--mpi=pmi2", "-N2", "-n3", sys.executable, program, "fail")
    assert done.returncode != 0
    assert "first cause: rank 2" in done.stderr
    assert "ValueError: no luck on rank 2" in done.stderr
