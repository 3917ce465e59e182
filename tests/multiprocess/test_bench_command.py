"""`renkei bench step` in real processes: who was measured, and that the numbers fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from multiprocess.commands import RENKEI, check_json_alone, run

CONTESTANTS = ["no communication", "renkei", "ddp, 1 MiB buckets", "ddp, 4 MiB buckets", "ddp, 25 MiB buckets"]


def check_measurements(results: list[dict[str, Any]], contestants: list[str]) -> None:
    assert [result["name"] for result in results] == contestants
    alone = results[0]["median_ms"]
    peers = [result["median_ms"] for result in results if result["name"].startswith("ddp")]
    for result in results:
        assert set(result) == {"name", "model", "median_ms", "quartiles_ms", "exposed_ms", "ratio"}
        assert result["model"] == "perceptron"
        low, high = result["quartiles_ms"]
        assert 0 < low <= result["median_ms"] <= high
        assert result["exposed_ms"] == pytest.approx(result["median_ms"] - alone, abs=0.002)
        if peers:
            assert result["ratio"] == pytest.approx(result["median_ms"] / min(peers), abs=0.001)
        else:
            assert result["ratio"] is None


def test_a_step_is_measured_against_ddp(tmp_path: Path) -> None:
    command = (RENKEI, "bench", "step", "-n", "2", "--rounds", "2", "--models", "perceptron", "--json")
    found = check_json_alone(run(*command, cwd=tmp_path))
    assert list(found) == ["results"]
    check_measurements(found["results"], CONTESTANTS)


def test_without_json_the_results_are_a_table(tmp_path: Path) -> None:
    outcome = run(RENKEI, "bench", "step", "--rounds", "1", "--models", "perceptron", "--peers", "", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    heads, *rows = (re.split(" {2,}", line.strip()) for line in outcome.out.splitlines())
    assert heads == ["model", "who", "step, ms", "quartiles", "exposed, ms", "of best peer"]
    assert [row[:2] for row in rows] == [["perceptron", name] for name in CONTESTANTS[:2]]
    assert rows[0][4] == "0.00"


def test_red_twin_a_ratio_to_nobody() -> None:
    def measurement(name: str, median: float, ratio: float | None) -> dict[str, Any]:
        exposed = median - 10
        of = {"quartiles_ms": (median - 1, median + 1), "exposed_ms": exposed, "ratio": ratio, "model": "perceptron"}
        return {"name": name, "median_ms": median, **of}

    def measured(ratio: float | None) -> list[dict[str, Any]]:
        medians = [10.0, 12.0, 16.0, 15.0, 18.0]
        return [measurement(name, each, ratio and each / 15) for name, each in zip(CONTESTANTS, medians, strict=True)]

    check_measurements(measured(1.0), CONTESTANTS)
    with pytest.raises((AssertionError, TypeError)):
        check_measurements(measured(None), CONTESTANTS)
