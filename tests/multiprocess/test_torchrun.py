"""Ranks started by torchrun, on one host and as two agents."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from processes import HANG, finish, start

PROGRAM = r"""
import os, sys, torch, renkei
comm = renkei.create_communicator(timeout=20)
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
total = comm.all_reduce(torch.tensor(comm.rank))
again = renkei.create_communicator().all_gather_object(comm.inter_rank)
if comm.rank == 1 and "fail" in sys.argv: 1 / 0
comm.barrier()
sys.stdout.write(f"total {int(total)} of {comm.size} {again}\n")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return script


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    return start("-m", "torch.distributed.run", *arguments)


def test_ranks_of_one_host_meet_in_the_agents_store(program: Path) -> None:
    ((code, output),) = finish([torchrun("--standalone", "--nproc-per-node", "2", str(program))], 2 * HANG)
    assert code == 0, output
    assert output.count("total 1 of 2 [0, 0]") == 2
    assert "started by torchrun" in output


def test_ranks_of_two_agents_are_two_nodes(program: Path) -> None:
    from test_environment_variables import free_port

    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    results = finish([torchrun(*options, str(program)) for _ in range(2)], 2 * HANG)
    assert [code for code, _ in results] == [0, 0], results
    assert sum(output.count("total 1 of 2 [0, 1]") for _, output in results) == 2


def test_a_failing_rank_ends_the_job_and_tells_why_once(program: Path) -> None:
    ((code, output),) = finish([torchrun("--standalone", "--nproc-per-node", "2", str(program), "fail")], 2 * HANG)
    assert code != 0
    assert output.count("first cause: rank 1 on") == 1
    assert output.count("ZeroDivisionError: division by zero") >= 1
    assert "total" not in output
