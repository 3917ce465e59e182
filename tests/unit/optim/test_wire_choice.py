"""The way that gradients go: nearly the shortest step, and of those the one that changes training least."""

from __future__ import annotations

import random

import pytest

from renkei.communicators.exchange_times import ExchangeTimes
from renkei.optim import wire_choice
from renkei.optim.wire_choice import NEARLY, WAYS, WIRES, Measured, Way, choose, predict_exposed, ways_for

FREE = {wire: [0.0, 0.0] for wire in WIRES}
SLOW = ExchangeTimes([100, 1100], {"fp32": [16, 86], "bf16": [9, 44], "int8": [5, 25]}, FREE)  # 9 + 0.07 n, ...


def test_times_lie_on_a_line() -> None:
    assert [SLOW.seconds("fp32", number) for number in (0, 100, 600, 2100)] == pytest.approx(
        [0.009, 0.016, 0.051, 0.156]
    )
    uneven = ExchangeTimes([100, 1100], {"fp32": [5, 4]}, {"fp32": [1, 12]})  # as noise has it
    assert uneven.seconds("fp32", 10**6) == pytest.approx(0.005)
    assert uneven.processor_seconds("fp32", 50) == pytest.approx(0.00055)
    assert uneven.processor_seconds("fp32", 0) == 0


@pytest.mark.parametrize("broken", [([1], {}, {}), ([1, 2], {"fp32": [1]}, FREE), ([1, 2], {"fp32": [1, 2]}, FREE)])
def test_times_that_make_no_sense_are_refused(
    broken: tuple[list[int], dict[str, list[float]], dict[str, list[float]]],
) -> None:
    with pytest.raises(ValueError, match="two of each"):
        ExchangeTimes(*broken)


@pytest.mark.parametrize(
    ("computing", "waiting", "number", "way"),
    [
        (0.040, 0.003, 1000, "fp32"),  # whatever is predicted: it was measured that little is waited for
        (0.060, 0.040, 1000, "bf16"),
        (0.030, 0.060, 1000, "int8"),
        (0.023, 0.070, 1000, "int8 with double buffering"),
        (0.020, 0.0001, 0, "fp32"),
        (0.0, 0.0, 1000, "fp32"),
        (0.001, 8.0, 100_000, "int8"),  # nothing hides that, so lateness would be for little
    ],
)
def test_the_way_that_is_chosen(computing: float, waiting: float, number: int, way: str) -> None:
    assert str(choose(WAYS, Measured(computing, waiting, number), SLOW).way) == way


def test_late_gradients_in_16_bits_come_before_those_in_8() -> None:
    times = ExchangeTimes([100, 1100], {"fp32": [80, 80], "bf16": [40, 40], "int8": [39, 39]}, FREE)
    assert str(choose(WAYS, Measured(0.040, 0.053, 500), times).way) == "bf16 with double buffering"


def test_what_the_processor_does_is_not_hidden() -> None:
    """As on one host: coding takes longer than what it saves."""
    work = {"fp32": [3, 3], "bf16": [10, 10], "int8": [22, 22]}
    times = ExchangeTimes([100, 1100], {"fp32": [5, 5], "bf16": [12, 12], "int8": [24, 24]}, work)
    measured = Measured(computing=0.013, waiting=0.002, number=500)  # of what is computed, 3 ms are the exchange's
    assert predict_exposed(Way("bf16", is_late=True), 0.010, 500, times) == pytest.approx(0.010)
    assert str(choose(WAYS, measured, times).way) == "fp32"
    assert choose(WAYS, measured, times).why.startswith("a step computes for 10 ms, and the exchange of 500 gradients")


def test_the_reason_has_the_numbers() -> None:
    why = choose(WAYS, Measured(0.060, 0.040, 1000), SLOW).why
    assert "exchange of 1,000 gradients, which alone takes 79 ms in fp32, 40 ms in bf16, 23 ms in int8, adds" in why
    assert "adds 40 ms in fp32, and by prediction 0.5 ms in bf16, 0 ms in int8, 0 ms in bf16 with double" in why
    assert why.endswith("of the ways at most 10% slower than the quickest, bf16 changes training least")


def test_which_ways_there_are_to_choose_from() -> None:
    assert ways_for(None) == WAYS
    assert ways_for(None, may_be_late=False) == tuple(Way(wire) for wire in WIRES)
    assert ways_for(True) == tuple(Way(wire, is_late=True) for wire in WIRES)
    assert ways_for(False) == ways_for(None, may_be_late=False)


def check_any_choice(seed: int) -> None:
    """Its step is nearly the shortest, and the step of each way that changes training less is longer than nearly."""
    draw = random.Random(seed)
    milliseconds = {wire: sorted(draw.expovariate(1 / 50) for _ in range(2)) for wire in WIRES}
    work = {wire: [each * draw.choice([0, 0.1, 0.9]) for each in both] for wire, both in milliseconds.items()}
    times = ExchangeTimes([1000, 9000], milliseconds, work)
    measured = Measured(draw.expovariate(1 / 0.05), draw.expovariate(1 / 0.05), draw.randrange(20_000))
    ways = ways_for(draw.choice([None, True, False]), may_be_late=draw.random() < 0.8)
    working = min(times.processor_seconds("fp32", measured.number), measured.computing)
    computing = measured.computing - working
    steps = {way: computing + predict_exposed(way, computing, measured.number, times) for way in ways[1:]}
    steps = {ways[0]: computing + measured.waiting + working} | steps
    chosen = choose(ways, measured, times).way
    shortest = min(steps.values())
    assert steps[chosen] <= NEARLY * shortest * (1 + 1e-9)
    for way in ways[: ways.index(chosen)]:
        assert steps[way] > NEARLY * shortest * (1 - 1e-9)
        assert steps[way] > steps[chosen]


def check_choices() -> None:
    for seed in range(500):
        check_any_choice(seed)


def test_any_choice() -> None:
    check_choices()


def test_red_twin_lateness_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = predict_exposed
    monkeypatch.setattr(wire_choice, "predict_exposed", lambda way, *rest: wrong(Way(way.wire), *rest))
    with pytest.raises(AssertionError):
        check_choices()
