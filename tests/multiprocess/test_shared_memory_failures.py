"""Shared memory among processes: a rank killed at any time, more ranks than cores, no memory, nothing left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from needs import linux
from processes import HANG, LEAVE_PID, finish, read_pids, start

pytestmark = linux

PREPARE = r"""
import os, resource, sys, torch, renkei
if "small" in sys.argv and os.environ["RANK"] == "0": resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
comm = renkei.create_communicator("flat/shared_memory", timeout=20)
if "large" in sys.argv: comm.allocate(2**45, torch.float32, comm.device)
buffer, private = comm.allocate(300_007, torch.float32, comm.device), torch.zeros(100_003)
"""
ADD = r"""
if "fork" in sys.argv[1:] and os.fork() == 0: sys.exit()  # which runs what is to be done at exit
if "fork" in sys.argv[1:]: os.wait()
for number in range(10 if "end" in sys.argv else 10**9):
    for each in (buffer, private, private[:7]):
        each.fill_(comm.rank)
        comm.start_sum(each, [each]).wait()
        assert each.eq(comm.size * (comm.size - 1) / 2).all()
comm.barrier()
sys.stdout.write(f"rank {comm.rank} done\n")
"""


def start_ranks(num_ranks: int, how: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Ranks of the program above, each a process of its own that nobody watches."""
    program = folder / "program.py"
    program.write_text(PREPARE + LEAVE_PID + ADD)  # so a rank is killed among sums
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    job = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PIDS": str(folder)}
    return [start(str(program), *how.split(), variables=job | {"RANK": str(rank)}) for rank in range(num_ranks)]


def test_a_forked_child_that_ends_leaves_its_parents_connections_alone(tmp_path: Path) -> None:
    for code, output in finish(start_ranks(2, "end fork", tmp_path)):
        assert code == 0, output
        assert "done" in output


def test_more_ranks_than_cores_end_well(tmp_path: Path) -> None:
    num_ranks = 2 * (os.cpu_count() or 1) + 1
    results = finish(start_ranks(min(num_ranks, 7), "end", tmp_path), 1.5 * HANG)
    assert [code for code, _ in results] == [0] * len(results), results
    assert all(f"rank {rank} done" in output for rank, (_, output) in enumerate(results))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_at_any_time_is_named_by_the_others_soon(victim: int, tmp_path: Path) -> None:
    processes = start_ranks(3, "go on", tmp_path)
    try:
        pids = read_pids(tmp_path, 3)
        time.sleep(random.uniform(0, 0.5))
        os.kill(pids[victim], signal.SIGKILL)
    finally:
        killed = time.monotonic()
        results = finish(processes)
    assert time.monotonic() - killed < HANG / 2
    assert results[victim][0] == -signal.SIGKILL, results
    for rank, (code, output) in enumerate(results):
        if rank != victim:
            assert code == 1, output
            # who is told by another's end names that one
            assert re.search(rf"first cause: .*rank {rank} lost rank \d in all_reduce", output), output
    assert any(f"lost rank {victim} in" in output for _, output in results)


@pytest.mark.parametrize(("how", "words"), [("small", "rank 0: this host has no"), ("large", "of shared memory left")])
def test_too_little_memory_is_one_error_on_all_ranks(how: str, words: str, tmp_path: Path) -> None:
    for code, output in finish(start_ranks(2, how, tmp_path)):
        assert code == 2, output
        assert words in output
        assert "use backend='gloo'" in output
        assert "Traceback" not in output
