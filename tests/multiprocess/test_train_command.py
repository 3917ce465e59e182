"""`renkei train` in real processes: what it prints and records, whoever has started the ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import renkei
from leaks import is_running
from multiprocess.commands import (
    PATIENCE,
    RENKEI,
    TORCHRUN,
    Outcome,
    check_json_alone,
    run,
    strictly,
    train,
    wait_for,
    without_announcements,
)
from needs import MPIEXEC, linux, mpich
from unit.data import idx_files

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # new processes can't import a test

KEYS = ["recipe", "world_size", "epochs", "steps", "loss", "top1", "samples_per_second", "seconds", "run_dir"]
ONE_EPOCH = ("--set", "epochs=1", "--set", "threads=1", "--json")
REPORT_EVERY = 10  # steps, as in every recipe
PROGRESS_KEYS = {"kind", "time", "epoch", "step", "learning_rate", "means", "samples_per_second", "step_ms", "shares"}
PARTS = ["data", "computing", "communication", "waiting"]
STEPS = 23  # in an epoch: 1,438 digits in batches of 64


def check_result(outcome: Outcome, cwd: Path, **expected: Any) -> Path:
    """The result is complete, and is what the records say; returns their folder."""
    result = check_json_alone(outcome)
    assert sorted(result) == sorted(KEYS)
    assert {name: result[name] for name in expected} == expected
    assert result["samples_per_second"] > 0
    assert result["seconds"] > 0
    run_dir = cwd / result["run_dir"]
    record = strictly((run_dir / "run.json").read_text())
    assert record["result"] == result
    check_ranks(record, result["world_size"])
    if result["world_size"] > 1:
        assert f", {record['threads']} thread{'s' * (record['threads'] > 1)} a rank\n" in outcome.err
    for rank in range(result["world_size"]):
        check_lines(run_dir / f"rank-{rank}.jsonl", result)
    return run_dir


def check_ranks(record: dict[str, Any], size: int) -> None:
    assert [each["rank"] for each in record["ranks"]] == list(range(size))
    assert {each["host"] for each in record["ranks"]} == {socket.gethostname()}
    assert len({each["pid"] for each in record["ranks"]}) == size


def check_lines(path: Path, result: dict[str, Any]) -> None:
    lines = [strictly(line) for line in path.read_text().splitlines()]
    assert {line["kind"] for line in lines} <= {"progress", "evaluation"}
    progress = [line for line in lines if line["kind"] == "progress"]
    assert [line["step"] for line in progress] == list(range(REPORT_EVERY, result["steps"] + 1, REPORT_EVERY))
    assert all(set(line) == PROGRESS_KEYS and set(line["means"]) == {"loss", "top1"} for line in progress)
    assert all(list(line["step_ms"]) == list(line["shares"]) == PARTS for line in progress)
    assert all(len(part) == REPORT_EVERY for line in progress for part in line["step_ms"].values())
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["epoch"] for line in evaluations] == list(range(1, result["epochs"] + 1))
    assert evaluations[-1]["top1"] == result["top1"]
    assert evaluations[-1]["loss"] == result["loss"]


# -- whoever starts the ranks -------------------------------------------------------------------------------------


@linux
def test_ranks_are_recorded_from_the_start_and_the_result_is_one_json_object(tmp_path: Path) -> None:
    command = [RENKEI, "train", "digits", "-n", "2", "--set", "epochs=3", "--json", "--run-dir", "records"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        path = tmp_path / "records" / "run.json"
        wait_for(path.exists, "run.json")
        record = strictly(path.read_text())
        check_ranks(record, 2)
        assert "result" not in record
        assert all(is_running(each["pid"]) for each in record["ranks"])
        out, err = process.communicate(timeout=PATIENCE)
    run_dir = check_result(Outcome(process.returncode, out, err), tmp_path, world_size=2, epochs=3, steps=3 * STEPS)
    assert run_dir == tmp_path / "records"
    assert strictly(out)["top1"] > 0.7
    evaluations = [line for line in without_announcements(err) if "evaluation: loss " in line]
    assert [line.split("  ")[0] for line in evaluations] == ["epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3"]


def test_torchrun_may_start_the_ranks(tmp_path: Path) -> None:
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", RENKEI, "train", "digits", *ONE_EPOCH]
    check_result(run(*command, cwd=tmp_path), tmp_path, world_size=2, epochs=1, steps=STEPS)


@mpich
def test_mpiexec_may_start_the_ranks(tmp_path: Path) -> None:
    command = [str(MPIEXEC), "-n", "3", RENKEI, "train", "digits", "-n", "3", *ONE_EPOCH]
    check_result(run(*command, cwd=tmp_path), tmp_path, world_size=3, epochs=1, steps=STEPS)


def test_renkei_run_may_and_the_training_is_that_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_perceptron() -> dict[str, Any]:
        from dataclasses import replace

        from renkei.models.convnet import perceptron
        from renkei.recipes import RECIPES
        from renkei.recipes.train import train

        recipe = replace(RECIPES["digits"](), build=lambda settings: perceptron(64, 32, 10))  # no batch normalization
        changes = {"epochs": 1, "threads": 1, "global_batch_size": 50, "micro_batch_size": 7}
        return train(recipe, recipe.settings.model_copy(update=changes))

    monkeypatch.chdir(tmp_path)
    (alone,) = renkei.run(train_perceptron, 1)
    together = renkei.run(train_perceptron, 3)
    assert {result["loss"] for result in together} == {together[0]["loss"]}
    assert together[0]["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert together[0]["top1"] == pytest.approx(alone["top1"], abs=1.1 / 359)
    assert together[0]["steps"] == alone["steps"] == 29


# -- awkward sizes ------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_dataset_is_the_dataset(tmp_path: Path) -> None:
    outcome = train("digits", "-n", "2", *ONE_EPOCH, "--set", "global_batch_size=5000", cwd=tmp_path)
    check_result(outcome, tmp_path, world_size=2, epochs=1, steps=1)


def test_more_ranks_than_samples_train_all_the_same(tmp_path: Path) -> None:
    data = idx_files.write(tmp_path / "data", num_training=3, num_test=2)
    command = ("fashion-mnist", "-n", "4", "--data", str(data), *ONE_EPOCH, "--set", "global_batch_size=2")
    check_result(train(*command, cwd=tmp_path), tmp_path, world_size=4, epochs=1, steps=2)


# -- one rank, and what is printed for people ---------------------------------------------------------------------


def test_without_n_this_process_is_the_only_rank_and_without_json_the_result_is_a_sentence(tmp_path: Path) -> None:
    outcome = train("digits", "--set", "epochs=2", "--run-dir", "records", cwd=tmp_path)
    assert outcome.code == 0
    (line,) = outcome.out.splitlines()
    assert line.startswith("digits: top-1 0.")
    assert " after 2 epochs (46 steps) on 1 ranks; " in line
    assert line.endswith("; records in records")
    record = strictly((tmp_path / "records" / "run.json").read_text())
    check_ranks(record, 1)
    check_lines(tmp_path / "records" / "rank-0.jsonl", record["result"])


# -- interrupted --------------------------------------------------------------------------------------------------


@linux
def test_an_interrupt_ends_every_rank_and_leaves_the_records(tmp_path: Path) -> None:
    command = [RENKEI, "train", "digits", "-n", "2", "--set", "epochs=100000", "--run-dir", "records"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = tmp_path / "records" / "rank-1.jsonl"
        wait_for(lambda: lines.exists() and lines.read_text(), "progress of rank 1")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "renkei: interrupted"
    assert "Traceback" not in err
    record = strictly((tmp_path / "records" / "run.json").read_text())
    assert not any(is_running(each["pid"]) for each in record["ranks"])
