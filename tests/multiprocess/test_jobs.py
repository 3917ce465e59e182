"""Communicators of ranks that are processes, started by `renkei.run` and `renkei.launch.local.launch`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from renkei.errors import RankFailedError, UsageError
from renkei.launch.local import launch, run

HANG = 20.0


def test_create_communicator_finds_all_ranks_once_and_again() -> None:
    def body() -> tuple[float, list[int], bool]:
        import torch

        import renkei

        with renkei.create_communicator() as first, renkei.create_communicator("naive/gloo", timeout=20) as second:
            total = float(first.all_reduce(torch.tensor(float(first.rank))))
            second.barrier()
            return total, second.all_gather_object(second.rank), second.options.timeout == 20

    assert run(body, 3) == [(3.0, [0, 1, 2], True)] * 3


def test_one_rank_needs_no_launcher() -> None:
    def body() -> tuple[int, int, str]:
        import renkei

        comm = renkei.create_communicator()
        comm.barrier()
        return comm.rank, comm.all_reduce_object(1), comm.name

    assert run(body, 1) == [(0, 1, "flat")]


def test_a_rank_that_raises_is_named_and_not_those_it_leaves_waiting() -> None:
    def body() -> None:
        import torch

        import renkei

        comm = renkei.create_communicator()
        comm.barrier()
        if comm.rank == 1:
            raise ZeroDivisionError("boom")
        comm.all_reduce(torch.zeros(3))

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed: ZeroDivisionError: boom") as caught:
        run(body, 3)
    assert caught.value.rank == 1
    assert "lost" not in str(caught.value)
    assert time.monotonic() - begin < HANG


def test_a_rank_that_raises_with_messages_on_their_way_does_not_wait_for_them() -> None:
    def body() -> None:
        import torch

        import renkei

        comm = renkei.create_communicator()
        if comm.rank == 1:
            buffer = torch.zeros(1009)
            comm.start_sum(buffer, [buffer])
            raise ZeroDivisionError("boom")
        comm.recv(1)

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed: ZeroDivisionError"):
        run(body, 2)
    assert time.monotonic() - begin < HANG


def test_a_mistake_is_one_error_without_traceback() -> None:
    def body() -> None:
        import torch

        import renkei

        comm = renkei.create_communicator()
        comm.all_reduce(torch.zeros(3 + comm.rank))

    with pytest.raises(UsageError, match=r"rank 0 calls all_reduce .*float32\[3\]; rank 1 calls .*float32\[4\]"):
        run(body, 2)


PLAIN_TORCH = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print("total", float(total))
if dist.get_rank() == 1 and os.environ.get("FALL"):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
dist.destroy_process_group()
"""


def test_a_script_of_plain_torch_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(PLAIN_TORCH)
    assert launch(["script", str(tmp_path / "script.py")], 2) is None
    assert "total 1.0" in capfd.readouterr().out


def test_in_a_script_of_plain_torch_the_rank_that_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALL", "1")
    (tmp_path / "script.py").write_text(PLAIN_TORCH)
    failure = launch(["script", str(tmp_path / "script.py")], 2)
    assert failure is not None
    assert (failure.rank, failure.summary) == (1, "ended by signal 9 (SIGKILL)")


def test_red_twin_the_rank_that_complains_taken_for_the_one_that_fell(monkeypatch: pytest.MonkeyPatch) -> None:
    from renkei.launch import local

    whole = local._untold
    monkeypatch.setattr(local, "_untold", lambda *args: whole(*args[:3], time.time()))

    def body() -> None:
        time.sleep(0.5)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RankFailedError) as caught:
        run(body, 2)
    assert caught.value.rank == 0
