"""Several hosts: ranks find one another by rank 0's address, and know which of them share a host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.hosts import Hosts

RANKS = str(Path(__file__).with_name("ranks.py"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as three:
        yield three


def read(processes: list[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """What the ranks said, by rank."""
    said = []
    for process in processes:
        output, errors = process.communicate(timeout=50)
        assert process.returncode == 0, errors
        said += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda each: int(str(each["rank"])))


def test_ranks_started_by_hand_on_hosts_with_two_one_and_one_of_them(hosts: Hosts) -> None:
    """By the name of rank 0's host; by its address they meet in the contract."""
    place = [0, 1, 0, 2]  # rank by rank
    meeting = {"MASTER_ADDR": hosts.names[0], "MASTER_PORT": "23456", "WORLD_SIZE": "4"}
    said = read(
        [hosts.start(host, sys.executable, RANKS, RANK=str(rank), **meeting) for rank, host in enumerate(place)]
    )
    assert [each["sum"] for each in said] == [6.0] * 4
    assert all(each["alike"] for each in said)
    assert [each["inter_rank"] for each in said] == [0, 1, 0, 2]
    assert [each["intra_rank"] for each in said] == [0, 0, 1, 0]
    assert [each["intra_size"] for each in said] == [2, 1, 2, 1]
    assert [each["address"] for each in said] == [hosts.address(host) for host in place]


def test_shared_memory_is_that_of_a_host_alone(hosts: Hosts) -> None:
    def tell(host: int, command: str) -> tuple[int, str]:
        process = hosts.start(host, "sh", "-c", command)
        return (process.wait(20), process.communicate()[0])

    assert tell(0, "echo here > /dev/shm/word") == (0, "")
    assert tell(0, "cat /dev/shm/word") == (0, "here\n")
    assert tell(1, "cat /dev/shm/word") == (1, "")


def test_torchrun_on_two_hosts(hosts: Hosts) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.address(0)}:29400", "--rdzv-id", "lab"]
    said = read([hosts.start(host, *torchrun, *rendezvous, RANKS) for host in (0, 1)])
    assert [each["sum"] for each in said] == [6.0] * 4
    assert all(each["alike"] for each in said)
    assert [each["inter_rank"] for each in said] == [0, 0, 1, 1]


def test_a_host_on_which_rank_0_is_not_can_not_be_met(hosts: Hosts) -> None:
    meeting = {"MASTER_ADDR": hosts.address(1), "MASTER_PORT": "23457", "WORLD_SIZE": "2"}
    waiting = {"RENKEI_ASSEMBLY_SECONDS": "3"}
    ranks = [hosts.start(host, sys.executable, RANKS, RANK=str(host), **meeting, **waiting) for host in (0, 1)]
    for process in ranks:
        _, errors = process.communicate(timeout=50)
        assert process.returncode == 2, errors
        assert "Traceback" not in errors
        assert sum(line.startswith("renkei:") for line in errors.splitlines()) == 1, errors
