"""An all-reduce's numbers: bandwidth by the formula, shares of memory and of peers by the round."""

from __future__ import annotations

import statistics

import pytest
import torch

from renkei.bench import bandwidth, comparison
from renkei.bench.bandwidth import COPY, FILLING, AllReduceTime, bus_bandwidth, summarize, sums_in_a_row

SLOW = [1.0, 1.5, 2.0, 4.0, 7.0]  # by round, how much slower the machine was
TAKES = {("flat", "gloo"): 0.012, ("gloo", None): 0.016, ("mpi4py", None): 0.015, (COPY, None): 0.003}
PEERS = ["gloo", "mpi4py"]
SIZE = 10**7


def results(peers: list[str] = PEERS, num_ranks: int = 4) -> dict[str, AllReduceTime]:
    seconds = {name: [each * slow for slow in SLOW] for name, each in TAKES.items()}
    found = summarize(seconds, peers, dtype="float32", num_bytes=SIZE, num_ranks=num_ranks)
    return {result.name: result for result in found}


def test_the_bus_carries_what_each_rank_must_send() -> None:
    assert bus_bandwidth(10**9, 0.5, num_ranks=2) == pytest.approx(2.0)  # half of the buffer, twice
    assert bus_bandwidth(10**9, 0.5, num_ranks=4) == pytest.approx(3.0)
    assert bus_bandwidth(10**9, 0.5, num_ranks=1) == 0


def check_shares() -> None:
    found = results()
    assert {name: result.ratio for name, result in found.items()} == {
        "flat/gloo": 0.8,
        "gloo": 1.0667,
        "mpi4py": 1.0,
        COPY: None,
    }
    assert {name: result.of_memory for name, result in found.items()} == {
        "flat/gloo": 0.25,
        "gloo": 0.1875,
        "mpi4py": 0.2,
        COPY: 1.0,
    }


def test_shares_are_of_the_same_round() -> None:
    check_shares()


def test_times_are_medians_and_quartiles_of_rounds() -> None:
    ours = results()["flat/gloo"]
    assert (ours.communicator, ours.backend, ours.dtype, ours.bytes) == ("flat", "gloo", "float32", SIZE)
    assert ours.median_ms == 12 * statistics.median(SLOW)
    assert ours.quartiles_ms == (18.0, 48.0)
    assert ours.bus_gb_per_s == round(1.5 * SIZE / 0.024 / 1e9, 6)


def test_without_peers_there_is_no_ratio_and_a_copy_has_no_bus() -> None:
    found = results(peers=[])
    assert [result.ratio for result in found.values()] == [None] * 4
    assert [name for name, result in found.items() if result.bus_gb_per_s is None] == [COPY]


def test_red_twin_rounds_that_are_not_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_round_off(one: list[float], other: list[float], strict: bool) -> zip[tuple[float, float]]:
        return zip(one, other[1:] + other[:1], strict=strict)

    monkeypatch.setattr(comparison, "zip", one_round_off, raising=False)
    with pytest.raises(AssertionError):
        check_shares()


# -- sums in a row ------------------------------------------------------------------------------------------------

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check_sums_stay_finite() -> None:
    for dtype in DTYPES:
        for num_ranks in (1, 2, 3, 4, 7, 64):
            in_a_row = sums_in_a_row(1, num_ranks, torch.finfo(dtype).max)
            assert in_a_row >= 1
            buffer = torch.tensor(FILLING, dtype=dtype)
            for _ in range(1 + in_a_row):  # the first isn't timed
                buffer *= num_ranks
            assert torch.isfinite(buffer), (dtype, num_ranks)


def test_sums_in_a_row_stay_finite() -> None:
    check_sums_stay_finite()


def test_red_twin_sums_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "sums_in_a_row", lambda num_bytes, num_ranks, largest: 32)
    with pytest.raises(AssertionError):
        check_sums_stay_finite()


def test_the_smaller_the_buffer_the_more_sums_make_a_turn() -> None:
    largest = torch.finfo(torch.float64).max
    turns = [sums_in_a_row(size, 2, largest) for size in (4, 2**18, 2**20, 2**23 - 1, 2**23, 2**30)]
    assert turns == [bandwidth._MOST_IN_A_ROW, 32, 8, 1, 1, 1]
