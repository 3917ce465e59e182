"""Contestants are compared round by round, so that a machine that is slow for a while harms nobody."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from renkei.bench import comparison
from renkei.bench.comparison import ALL_REDUCE, ALONE, compare

SLOW = [1.0, 1.5, 2.0, 4.0, 7.0]  # by round, how much slower the machine was
TAKES = {ALONE: 0.010, ALL_REDUCE: 0.004, "renkei": 0.012, "ddp, 1": 0.016, "ddp, 4": 0.015}
PEERS = ["ddp, 1", "ddp, 4"]


def seconds() -> dict[str, list[list[float]]]:
    """Five rounds of three steps, one of which somebody interrupts."""
    return {name: [[each * slow, each * slow, 9.0] for slow in SLOW] for name, each in TAKES.items()}


def check_ratios() -> None:
    ratios = {result.name: result.ratio for result in compare("model", seconds(), {}, PEERS)}
    assert ratios == {ALONE: 0.6667, ALL_REDUCE: None, "renkei": 0.8, "ddp, 1": 1.0667, "ddp, 4": 1.0}


def test_ratios_are_to_the_best_peer_of_the_same_round() -> None:
    check_ratios()


def test_exposed_is_what_a_step_takes_longer_in_the_same_round() -> None:
    exposed = {result.name: result.exposed_ms for result in compare("model", seconds(), {}, PEERS)}
    middle = statistics.median(SLOW)
    assert exposed == pytest.approx(
        {ALONE: 0, ALL_REDUCE: 4 * middle, "renkei": 2 * middle, "ddp, 1": 6 * middle, "ddp, 4": 5 * middle}
    )


def test_medians_and_quartiles_are_of_all_steps() -> None:
    (alone, *_) = compare("model", {ALONE: [[0.001, 0.002], [0.003, 0.004]]}, {}, [])
    assert (alone.median_ms, alone.quartiles_ms, alone.exposed_ms, alone.ratio) == (2.5, (1.25, 3.75), 0, None)


def test_waiting_is_the_median_of_all_steps_where_it_was_measured() -> None:
    waiting = {"renkei": [[0.001, 0.002], [0.009, 0.001]], "on a GPU": [[math.nan, math.nan]] * 2}
    took = {name: [[1.0, 1.0]] * 2 for name in (ALONE, *waiting)}
    found = {result.name: result.waiting_ms for result in compare("model", took, waiting, [])}
    assert found == {ALONE: None, "renkei": 1.5, "on a GPU": None}


def test_red_twin_the_peer_that_is_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "min", max, raising=False)
    with pytest.raises(AssertionError):
        check_ratios()


def test_red_twin_rounds_that_are_not_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_round_off(one: list[float], other: list[float], strict: bool) -> Any:
        return zip(one, other[1:] + other[:1], strict=strict)

    monkeypatch.setattr(comparison, "zip", one_round_off, raising=False)
    with pytest.raises(AssertionError):
        check_ratios()
