"""A run's folder tells from the start who takes part, and at every moment what has been measured."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import renkei
from needs import linux
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.testing import run_on_ranks
from renkei.training.records import RunRecord
from renkei.training.run_dir import create, new_run_dir, take_back

SETTINGS = {"recipe": "digits", "epochs": 2}


def read_run(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "run.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def read_lines(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    text = (run_dir / f"rank-{rank}.jsonl").read_text()
    return [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for line in text.splitlines()
    ]


def leave(run_dir: Path, size: int, result: dict[str, Any]) -> None:
    """Ranks that record three steps and a result."""

    def body(comm: Communicator) -> None:
        record = RunRecord(run_dir, comm, SETTINGS)
        for step in range(3):
            record.write("progress", step=step, rank=comm.rank)
        comm.barrier()
        record.finish(result)

    run_on_ranks(size, body)


def check_who_takes_part(run_dir: Path, size: int) -> None:
    run = read_run(run_dir)
    host = socket.gethostname()
    assert run["ranks"] == [{"rank": at, "host": host, "pid": os.getpid(), "device": "cpu"} for at in range(size)]
    assert run["world_size"] == size
    assert run["settings"] == SETTINGS
    assert run["communicator"] == "flat/shared_memory"
    assert run["versions"]["renkei"] == renkei.__version__
    assert "result" not in run


def check_lines_of_ranks(run_dir: Path, size: int) -> None:
    for rank in range(size):
        lines = read_lines(run_dir, rank)
        assert [(line["kind"], line["step"], line["rank"]) for line in lines] == [
            ("progress", at, rank) for at in range(3)
        ]
        assert all(line["time"] > 0 for line in lines)


# -- run.json and rank-R.jsonl ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_who_takes_part_is_told_from_the_start(tmp_path: Path, size: int) -> None:
    def body(comm: Communicator) -> None:
        record = RunRecord(tmp_path / "new" / "run", comm, SETTINGS)
        comm.barrier()
        check_who_takes_part(tmp_path / "new" / "run", size)
        comm.barrier()
        record.finish({})

    run_on_ranks(size, body)


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_has_a_file_of_its_own_and_rank_0_writes_the_result(tmp_path: Path, size: int) -> None:
    leave(tmp_path, size, {"top1": 0.5, "loss": math.nan})
    check_lines_of_ranks(tmp_path, size)
    assert read_run(tmp_path)["result"] == {"top1": 0.5, "loss": None}
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", *(f"rank-{rank}.jsonl" for rank in range(size))}


def check_lines_are_there_at_once(run_dir: Path) -> None:
    def body(comm: Communicator) -> None:
        record = RunRecord(run_dir, comm, SETTINGS)
        try:
            for step in range(3):
                record.write("progress", step=step, loss=math.inf)
                assert [line["step"] for line in read_lines(run_dir, 0)] == list(range(step + 1))
        finally:
            record.finish({})

    run_on_ranks(1, body)


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    check_lines_are_there_at_once(tmp_path)
    assert read_lines(tmp_path, 0)[0]["loss"] is None


def test_what_a_run_finds_out_is_there_at_once(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        record = RunRecord(tmp_path, comm, SETTINGS)
        record.add(chosen={"wire": "bf16"})
        comm.barrier()
        assert read_run(tmp_path)["chosen"] == {"wire": "bf16"}
        written = (tmp_path / "run.json").stat().st_ino
        record.add(chosen={"wire": "bf16"})  # nothing new
        assert (tmp_path / "run.json").stat().st_ino == written
        comm.barrier()
        record.add(chosen={"wire": "int8"})
        record.finish({"top1": 0.5})

    run_on_ranks(2, body)
    run = read_run(tmp_path)
    assert (run["chosen"], run["result"]) == ({"wire": "int8"}, {"top1": 0.5})


# -- the folder ---------------------------------------------------------------------------------------------------


def test_no_two_runs_have_the_same_folder() -> None:
    folders = {new_run_dir("digits") for _ in range(20)}
    assert len(folders) == 20
    assert {folder.parent for folder in folders} == {Path("runs")}
    assert all("_digits_" in folder.name for folder in folders)


def test_a_folder_that_is_there_already_will_do(tmp_path: Path) -> None:
    create(tmp_path / "a" / "b")
    create(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@linux
def test_a_folder_that_cannot_be_made_or_written_to_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run", Path("/proc"), Path("/proc/a/b"), tmp_path / "a" / ("b" * 300)):
        with pytest.raises(UsageError, match=r"can't be written to: [\w ]+; choose another"):
            create(folder)
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UsageError, match="can't be written to: Not a directory"):
        run_on_ranks(1, lambda comm: RunRecord(file, comm, {}))


def test_what_was_made_is_taken_back_but_for_what_others_have_put_there(tmp_path: Path) -> None:
    made = create(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "rank-1.log").write_text("")
    (tmp_path / "a" / "c").mkdir()
    take_back(made)
    take_back([])
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "c"]


# -- a folder is one run's ----------------------------------------------------------------------------------------


def check_all_are_refused(size: int, folder_of: Callable[[int], Path], reason: str) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            RunRecord(folder_of(comm.rank), comm, SETTINGS).finish({})
        comm.barrier()
        return str(caught.value)

    assert run_on_ranks(size, body) == [reason] * size


@pytest.mark.parametrize("left", ["run.json", "rank-0.jsonl", "rank-1.jsonl"])
def test_a_folder_with_another_runs_records_is_refused_on_all_ranks_and_left_as_it_was(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / left).write_text("{}")
    rank = 1 if left == "rank-1.jsonl" else 0
    reason = f"rank {rank}: {tmp_path} holds another run's records; choose another --run-dir"
    check_all_are_refused(3, lambda rank: tmp_path, reason)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(left, "{}")]


def in_a_file_on_rank_1(folder: Path) -> Callable[[int], Path]:
    (folder / "file").write_text("")
    return lambda rank: folder / ("file/run" if rank == 1 else "run")


def test_if_one_rank_cannot_write_all_say_which(tmp_path: Path) -> None:
    reason = f"rank 1: folder {tmp_path / 'file/run'} can't be written to: Not a directory; choose another"
    check_all_are_refused(3, in_a_file_on_rank_1(tmp_path), reason)
    assert not list(tmp_path.rglob("*.json*"))


def test_of_two_runs_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    def body(comm: Communicator) -> bool:
        own = comm.split(comm.rank // 2)
        try:
            record = RunRecord(tmp_path / "run", own, SETTINGS)
        except UsageError:
            return False
        finally:
            comm.barrier()
        record.finish({})
        return True

    got = run_on_ranks(4, body)
    assert sorted(got) == [False, False, True, True]
    assert got[0] == got[1]
    assert read_run(tmp_path / "run")["result"] == {}


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_lines_that_wait_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Any] = []
    monkeypatch.setattr(RunRecord, "write", lambda self, kind, **values: waiting.append(values))
    with pytest.raises(AssertionError):
        check_lines_are_there_at_once(tmp_path)


def gather_own_of(kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each rank take its own objects of these kinds for everybody's."""
    honest = Communicator.all_gather_object

    def lie(self: Communicator, obj: Any) -> list[Any]:
        return [obj] * self.size if isinstance(obj, kinds) else honest(self, obj)

    monkeypatch.setattr(Communicator, "all_gather_object", lie)


def test_red_twin_ranks_that_all_give_rank_0s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather_own_of(dict, monkeypatch)
    leave(tmp_path, 2, {})
    with pytest.raises(AssertionError):
        check_who_takes_part(tmp_path, 2)


def test_red_twin_a_rank_that_keeps_its_trouble_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather_own_of((str, type(None)), monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_all_are_refused(3, in_a_file_on_rank_1(tmp_path), "rank 1: ")
