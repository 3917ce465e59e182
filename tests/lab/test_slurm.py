"""srun and sbatch, for real: ranks are the tasks of the step, nodes are Slurm's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.slurm import Slurm

RANKS = str(Path(__file__).with_name("ranks.py"))
LOCAL = {"MASTER_ADDR": "127.0.0.1"}  # the nodes' names, n1 and n2, mean nothing outside Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(Path(f"/tmp/renkei-slurm-{tmp_path_factory.mktemp('slurm').parent.name}"), num_nodes=2) as two_nodes:
        yield two_nodes


def test_srun_of_three_tasks_on_two_nodes(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "-n3", sys.executable, RANKS, **LOCAL)
    assert done.returncode == 0, done.stderr
    said = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda each: each["rank"])
    assert [each["sum"] for each in said] == [3.0] * 3
    assert [each["inter_rank"] for each in said] == [0, 0, 1]
    assert [each["intra_size"] for each in said] == [2, 2, 1]
    assert "started by slurm" in done.stderr


def test_srun_trains_the_digits(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "renkei", "train", "digits", "--set", "epochs=1", "--json"]
    done = slurm.run("srun", "-N2", "--ntasks-per-node=2", *command, "--run-dir", str(tmp_path / "run"), **LOCAL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["world_size"] == 4
    assert result["top1"] > 0.5


def test_a_batch_script_is_one_process_and_its_srun_is_four(slurm: Slurm, tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/sh\n{sys.executable} {RANKS}\nMASTER_ADDR=127.0.0.1 srun {sys.executable} {RANKS}\n")
    done = slurm.run("sbatch", "--wait", "-N2", "-n4", f"--output={output}", str(script))
    assert done.returncode == 0, output.read_text()
    said = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    assert sorted(each["size"] for each in said) == [1, 4, 4, 4, 4]


def test_a_failing_task_ends_the_step_and_says_why(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import renkei\n"
        "comm = renkei.create_communicator()\n"
        "if comm.rank == 2: raise ValueError('no luck on rank 2')\n"
        "comm.barrier()\n"
    )
    done = slurm.run("srun", "-N2", "-n4", "--kill-on-bad-exit=1", sys.executable, str(script), **LOCAL)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: no luck on rank 2\n") >= 1
    assert "first cause: rank 2" in done.stderr
