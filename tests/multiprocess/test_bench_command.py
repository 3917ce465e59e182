"""`renkei bench step` in real processes: who was measured, and that the numbers fit together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from multiprocess.commands import RENKEI, check_json_alone, run
from renkei.bench.default_group import default_group
from renkei.bench.step import MODELS, PEERS
from renkei.bench.timeline import AWAITED
from renkei.cli import bench
from renkei.communicators.communicator import Communicator
from renkei.testing import run_on_ranks

DDP = ["ddp, 1 MiB buckets", "ddp, 4 MiB buckets", "ddp, 25 MiB buckets"]
OVER_OURS = [name.replace("ddp,", "ddp over shared_memory,") for name in DDP]
CONTESTANTS = ["no communication", "all-reduce alone", "renkei", *DDP]


def check_measurements(results: list[dict[str, Any]], contestants: list[str]) -> None:
    assert [result["name"] for result in results] == contestants
    peers = [result for result in results if result["name"].startswith("ddp,")]
    assert results[0]["exposed_ms"] == 0
    assert not peers or 1.0 in [peer["ratio"] for peer in peers]
    for result in results:
        assert set(result) == {"name", "model", "median_ms", "quartiles_ms", "exposed_ms", "waiting_ms", "ratio"}
        assert result["model"] == "perceptron"
        low, high = result["quartiles_ms"]
        assert 0 < low <= result["median_ms"] <= high
        is_step = result["name"] != "all-reduce alone"
        assert (result["ratio"] is not None) == bool(peers and is_step)
        assert (result["waiting_ms"] is not None) == (is_step and result["name"] != "no communication")


def test_a_step_is_measured_against_ddp(tmp_path: Path) -> None:
    command = (RENKEI, "bench", "step", "-n", "2", "--rounds", "2", "--models", "perceptron", "--json")
    found = check_json_alone(run(*command, "--trace", "timeline.json", cwd=tmp_path))
    assert list(found) == ["results"]
    check_measurements(found["results"], [*CONTESTANTS, *OVER_OURS])
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    for rank in range(2):
        names = [event["name"] for event in events if event["pid"] == rank]
        assert {f"perceptron: {name}" for name in [*CONTESTANTS, *OVER_OURS]} <= set(names)
        assert names.count("Optimizer.step#SGD.step") == 3 * (len(CONTESTANTS) + len(OVER_OURS) - 1)
        assert names.count(AWAITED) == 3 * (len(CONTESTANTS) + len(OVER_OURS) - 2)


def test_those_who_exchange_in_16_bits_are_compared_with_each_other(tmp_path: Path) -> None:
    peers = ("--peers", "ddp-fp16", "--models", "perceptron", "--rounds", "1", "--json")
    found = check_json_alone(run(RENKEI, "bench", "step", "-n", "2", *peers, cwd=tmp_path))
    names = [result["name"] for result in found["results"] if "fp16" in result["name"]]
    assert names == ["renkei, fp16", *(name.replace("ddp", "ddp-fp16") for name in DDP)]


def test_a_timeline_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    outcome = run(RENKEI, "bench", "step", "-n", "2", "--trace", "nowhere/timeline.json", cwd=tmp_path)
    assert outcome.code == 2
    assert "timeline nowhere/timeline.json can't be written" in outcome.err


def test_without_json_the_results_are_a_table(tmp_path: Path) -> None:
    outcome = run(RENKEI, "bench", "step", "--rounds", "1", "--models", "perceptron", "--peers", "", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    heads, *rows = (re.split(" {2,}", line.strip()) for line in outcome.out.splitlines())
    assert heads == ["model", "who", "step, ms", "quartiles", "exposed, ms", "waiting for the slowest", "of best peer"]
    assert [row[:2] for row in rows] == [["perceptron", name] for name in CONTESTANTS[:3]]
    assert rows[0][4] == "0.00"


def test_the_models_and_peers_that_the_command_names_are_those_there_are() -> None:
    assert set(bench.MODEL_NAMES) == set(MODELS)
    assert bench.PEERS == PEERS


def check_no_group_is_left(opened: Callable[[Communicator], AbstractContextManager[None]]) -> None:
    def fail(comm: Communicator) -> None:
        with opened(comm):
            assert dist.is_initialized()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_ranks(1, fail)
    assert not dist.is_initialized()


def test_the_peers_group_is_closed_also_if_measuring_fails() -> None:
    check_no_group_is_left(default_group)


def test_red_twin_a_group_that_is_closed_only_if_all_goes_well(monkeypatch: pytest.MonkeyPatch) -> None:
    end = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with pytest.raises(AssertionError):
        check_no_group_is_left(default_group)
    end()


def measured(ratios: list[float | None]) -> list[dict[str, Any]]:
    medians = [10.0, 3.0, 12.0, 16.0, 15.0, 18.0]
    exposed = [0.0, 3.0, 2.0, 6.0, 5.0, 8.0]
    return [
        {
            "name": name,
            "model": "perceptron",
            "median_ms": median,
            "quartiles_ms": (median - 1, median + 1),
            "exposed_ms": beyond,
            "waiting_ms": None if name in CONTESTANTS[:2] else 0.5,
            "ratio": ratio,
        }
        for name, median, beyond, ratio in zip(CONTESTANTS, medians, exposed, ratios, strict=True)
    ]


def test_red_twin_a_ratio_to_nobody_or_of_what_is_no_step() -> None:
    honest = [10 / 15, None, 12 / 15, 16 / 15, 1.0, 18 / 15]
    check_measurements(measured(honest), CONTESTANTS)
    for ratios in ([None] * 6, [honest[0], 3 / 15, *honest[2:]]):
        with pytest.raises((AssertionError, TypeError)):
            check_measurements(measured(ratios), CONTESTANTS)
