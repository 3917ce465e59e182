"""Ranks started by hand, each with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from processes import HANG, finish, start

PROGRAM = """
import torch, renkei
comm = renkei.create_communicator(timeout=20)
total = comm.all_reduce(torch.tensor(comm.rank))
comm.barrier()
print("total", int(total), "of", comm.size, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return script


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_rank(program: Path, rank: int, size: int, port: int, **variables: str) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start(str(program), variables=place | variables)


def check_refused(results: list[tuple[int, str]], *words: str) -> None:
    """Every process ended with 2 and one line of Renkei's, without traceback."""
    for code, output in results:
        assert code == 2, output
        assert "Traceback" not in output
        (line,) = output.splitlines()
        assert line.startswith("renkei: ")
        for word in words:
            assert word in line


def test_four_processes_find_one_another_and_rank_0_leaves_last(program: Path) -> None:
    others = "others = comm.split(None if comm.rank == 0 else 1)\nif others:\n    import time; time.sleep(1)\n"
    program.write_text(f"{PROGRAM}{others}    others.barrier(); print('worked on')\n")
    port = free_port()
    results = finish([start_rank(program, rank, 4, port) for rank in range(4)])
    assert [code for code, _ in results] == [0] * 4
    assert all("total 6 of 4" in output for _, output in results)
    assert "4 ranks on 1 node, started by variables; flat/shared_memory, cpu" in results[0][1]
    assert ["worked on" in output for _, output in results] == [False, True, True, True]


def test_a_stranger_at_the_port_is_told_by_every_rank_soon(program: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        begin = time.monotonic()
        results = finish([start_rank(program, rank, 3, port) for rank in range(3)])
        assert time.monotonic() - begin < HANG
    check_refused(results, str(port), "choose another MASTER_PORT")
    assert "rank 0 can't listen" in results[0][1]
    assert all("is not rank 0 of this job" in output for _, output in results[1:])


def test_ranks_that_disagree_on_their_number_are_told_so(program: Path) -> None:
    port = free_port()
    results = finish([start_rank(program, rank, size, port) for rank, size in ((0, 2), (1, 3))])
    check_refused(results, "rank 1 of 3", "waits for 2 ranks", "WORLD_SIZE")


def test_a_missing_rank_is_named_after_the_seconds_given(program: Path) -> None:
    port = free_port()
    variables = {"RENKEI_ASSEMBLY_SECONDS": "4"}
    results = finish([start_rank(program, rank, 3, port, **variables) for rank in (0, 1)])
    check_refused(results, "rank 2 had not come to rank 0 after 4 s")


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan"])
def test_seconds_that_are_no_number_are_wrong_usage(seconds: str, program: Path) -> None:
    results = finish([start_rank(program, 0, 1, 1, RENKEI_ASSEMBLY_SECONDS=seconds)])
    check_refused(results, f"RENKEI_ASSEMBLY_SECONDS={seconds!r}")


def test_contradictory_variables_are_wrong_usage(program: Path) -> None:
    check_refused(finish([start_rank(program, 5, 2, 1)]), "RANK=5", "WORLD_SIZE=2")
    check_refused(finish([start(str(program), variables={"RANK": "0"})]), "RANK=0", "WORLD_SIZE")


def test_without_variables_a_process_is_alone(program: Path) -> None:
    assert finish([start(str(program))]) == [(0, "total 0 of 1\n")]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(PROGRAM + "if comm.rank == 1: 1 / 0\ncomm.all_reduce(total)\n")
    port = free_port()
    results = finish([start_rank(script, rank, 3, port) for rank in range(3)])
    assert [code for code, _ in results] == [1, 1, 1]
    assert "first cause: rank 1 on" in results[1][1]
    assert results[1][1].count("Traceback") == 1
    for _, output in (results[0], results[2]):
        assert re.search("lost rank [01] in all_gather", output)  # the other may have been told first
        assert "Traceback" not in output
