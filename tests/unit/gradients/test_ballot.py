from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from renkei.gradients import ballot
from renkei.gradients.ballot import HEADER, MODULUS, Ballot, Tally

MANY = 18_000


def a_ballot(
    rank: int = 0,
    *,
    weight: float | None = None,
    step: int = 0,
    exchange: int = 0,
    gave_up: bool = False,
    heard: bool = True,
    used: Sequence[bool] = (),
) -> Ballot:
    return Ballot(rank, weight, step, exchange, gave_up, heard, used)


def count(ballots: Sequence[Ballot], copies: Sequence[int] | None = None) -> Tally:
    """The tally after a sum in 32 bits. With `copies`, as if each ballot were cast that many times."""
    cast = torch.tensor([each.encode() for each in ballots], dtype=torch.float32)
    if copies is None:
        return Tally.decode(cast.sum(0).tolist(), len(ballots))
    return Tally.decode((cast * torch.tensor(copies)[:, None]).sum(0).tolist(), sum(copies))


places = st.tuples(st.integers(0, 200), st.integers(-1, 200))


@given(st.lists(places, min_size=1, max_size=8))
def test_ranks_are_in_step_exactly_if_all_are_at_the_same_place(ranks: list[tuple[int, int]]) -> None:
    tally = count([a_ballot(rank, step=step, exchange=exchange) for rank, (step, exchange) in enumerate(ranks)])
    assert tally.is_in_step == (len({(step % MODULUS, exchange % MODULUS) for step, exchange in ranks}) == 1)


def check_places(num_ranks: int) -> None:
    """Equal places are told from those of which one rank's differs, by whatever it differs."""
    for step in range(MODULUS):
        for other in range(MODULUS):
            for places in ({"step": step}, {"step": other}), ({"exchange": step}, {"exchange": other}):
                tally = count([a_ballot(**place) for place in places], [num_ranks - 1, 1])
                assert tally.is_in_step == (step == other), f"{num_ranks - 1} at {step}, one at {other}"


@pytest.mark.parametrize("num_ranks", [2, 3, 1000, MANY - 1, MANY])
def test_one_rank_out_of_step_by_any_amount_is_seen_by_all(num_ranks: int) -> None:
    check_places(num_ranks)


def test_half_of_the_ranks_ahead_and_half_behind_is_seen() -> None:
    """Their mean place is the right one: the sum alone would not tell."""
    assert not count([a_ballot(step=4), a_ballot(step=5), a_ballot(step=6)], [7, 3, 7]).is_in_step


def test_red_twin_larger_circles_are_not_exact_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballot, "MODULUS", 64)
    monkeypatch.setitem(globals(), "MODULUS", 64)
    with pytest.raises(AssertionError):
        check_places(MANY - 1)


def test_red_twin_without_squares_opposite_errors_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballot, "_all_equal", lambda total, squares, count: total % count == 0)
    with pytest.raises(AssertionError):
        test_half_of_the_ranks_ahead_and_half_behind_is_seen()


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=8))
def test_users_are_counted_for_each_parameter(used: list[list[bool]]) -> None:
    tally = count([a_ballot(rank, used=flags) for rank, flags in enumerate(used)])
    assert list(tally.counts) == [sum(column) for column in zip(*used, strict=True)]


def test_users_are_counted_exactly_among_the_most_ranks() -> None:
    tally = count([a_ballot(used=[True, False, True]), a_ballot(used=[True, True, False])], [MANY - 1, 1])
    assert list(tally.counts) == [MANY, 1, MANY - 1]


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=8))
def test_weights_add_up(weights: list[float]) -> None:
    tally = count([a_ballot(rank, weight=weight) for rank, weight in enumerate(weights)])
    assert tally.weight == pytest.approx(sum(weights), rel=1e-6)
    assert not tally.is_mixed


def test_sample_counts_add_up_exactly_among_the_most_ranks() -> None:
    assert count([a_ballot(weight=256), a_ballot(weight=131)], [MANY - 1, 1]).weight == 256 * (MANY - 1) + 131


@pytest.mark.parametrize(
    ("weights", "total", "is_mixed"),
    [
        ([None, None, None], 3, False),
        ([None, 0.0, None], 2, False),  # backward(None) among equal ranks: the mean of those that have samples
        ([0.0, 0.0], 0, False),
        ([None, 2.0], 3, True),
        ([1.0, None, 0.0], 2, True),
    ],
)
def test_some_with_a_weight_and_some_without_is_seen(weights: list[float | None], total: float, is_mixed: bool) -> None:
    tally = count([a_ballot(rank, weight=weight) for rank, weight in enumerate(weights)])
    assert (tally.weight, tally.is_mixed) == (total, is_mixed)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_who_gave_up_is_known_if_it_is_one(gave_up: list[bool]) -> None:
    tally = count([a_ballot(rank, gave_up=flag) for rank, flag in enumerate(gave_up)])
    assert tally.num_gave_up == sum(gave_up)
    assert tally.one_that_gave_up == (gave_up.index(True) if sum(gave_up) == 1 else None)


def test_the_last_of_the_most_ranks_is_named_when_it_gives_up() -> None:
    tally = count([a_ballot(), a_ballot(MANY - 1, gave_up=True)], [MANY - 1, 1])
    assert (tally.num_gave_up, tally.one_that_gave_up) == (1, MANY - 1)


@pytest.mark.parametrize("heard", [[True, True], [True, False], [False, False]])
def test_ranks_that_heard_gradients_come_are_counted(heard: list[bool]) -> None:
    assert count([a_ballot(rank, heard=flag) for rank, flag in enumerate(heard)]).num_heard == sum(heard)


def test_the_header_is_as_long_as_it_says() -> None:
    assert len(a_ballot(used=[True] * 5).encode()) == HEADER + 5
