"""Learning rates: the values papers give, at the epochs they give them for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renkei.optim.schedules import Schedule, constant, cosine, gradual_warmup

EPOCHS = st.floats(0, 200)


def test_a_constant_is_the_same_at_all_times() -> None:
    assert {constant(0.3)(epoch) for epoch in (-1.0, 0.0, 0.5, 1e9)} == {0.3}


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(-1, 0.4), (0, 0.4), (22.5, 0.2 * (1 + math.sqrt(0.5))), (45, 0.2), (90, 0.0), (91, 0.0), (1e9, 0.0)],
)
def test_a_cosine_falls_from_its_peak_to_zero_and_stays_there(epoch: float, expected: float) -> None:
    assert cosine(0.4, epochs=90)(epoch) == pytest.approx(expected, abs=1e-15)


def test_a_cosine_may_end_above_zero() -> None:
    schedule = cosine(1.0, epochs=10, end=0.2)
    assert [schedule(epoch) for epoch in (0, 5, 10, 20)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@settings(deadline=None)
@given(EPOCHS, EPOCHS)
def test_a_cosine_never_rises(one: float, other: float) -> None:
    schedule = cosine(0.4, epochs=90, end=0.01)
    earlier, later = sorted((one, other))
    assert schedule(earlier) >= schedule(later)
    assert 0.01 <= schedule(later) <= 0.4


@pytest.mark.parametrize(
    ("epoch", "expected"), [(-1, 0.025), (0, 0.025), (2.5, 0.2125), (4, 0.325), (5, 0.4), (5.1, 0.4), (80, 0.4)]
)
def test_a_warm_up_rises_linearly_to_what_it_warms_up_to(epoch: float, expected: float) -> None:
    schedule = gradual_warmup(constant(0.4), epochs=5, start=1 / 16)
    assert schedule(epoch) == pytest.approx(expected)


def check_the_schedule_runs_from_the_beginning(warm_up: Schedule) -> None:
    """Warming up takes the place of the schedule's first epochs; it doesn't put it off."""
    plain = cosine(0.4, epochs=90)
    assert warm_up(2.5) == pytest.approx(plain(2.5) / 2)
    for epoch in (5, 30, 89.5, 90):
        assert warm_up(epoch) == plain(epoch)


def test_the_schedule_runs_from_the_beginning_all_the_same() -> None:
    check_the_schedule_runs_from_the_beginning(gradual_warmup(cosine(0.4, epochs=90), epochs=5))


def test_no_warm_up_changes_nothing() -> None:
    schedule = gradual_warmup(cosine(0.4, epochs=90), epochs=0)
    assert [schedule(epoch) for epoch in (0, 1, 90)] == [cosine(0.4, epochs=90)(epoch) for epoch in (0, 1, 90)]


def test_red_twin_a_warm_up_that_puts_the_schedule_off() -> None:
    def put_off(epoch: float) -> float:
        return 0.4 * epoch / 5 if epoch < 5 else cosine(0.4, epochs=90)(epoch - 5)

    with pytest.raises(AssertionError):
        check_the_schedule_runs_from_the_beginning(put_off)
