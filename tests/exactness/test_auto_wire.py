"""``wire="auto"``: ranks choose alike, by the slowest, and train before and after as they would otherwise."""

from __future__ import annotations

import copy
import io
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import renkei
from exactness.ledger import Ledger
from exactness.one_process import assert_same_bits, error_of, on_ranks
from renkei.communicators import tuning
from renkei.communicators.communicator import Communicator
from renkei.communicators.exchange_times import ExchangeTimes
from renkei.communicators.factory import tuning_key
from renkei.communicators.tuning import Tuning, remember
from renkei.optim.auto_wire import STEPS, AutoWire
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.optim.wire_choice import Choice, Measured, Way, choose, ways_for

RANKS = 2
SPEC = "flat/shared_memory"
NOTHING = {wire: [0.0, 0.0] for wire in ("fp32", "bf16", "int8")}
TIMES = ExchangeTimes([10, 1000], {"fp32": [76.0, 76.0], "bf16": [39.0, 39.0], "int8": [20.0, 20.0]}, NOTHING)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuning.FILE_VARIABLE, str(path))
    save(TIMES)
    return path


def save(times: ExchangeTimes | None, spec: str = SPEC) -> None:
    key = tuning_key(["node"] * RANKS, torch.device("cpu"))
    remember(key, Tuning(spec, 2**20, None, "2026-12-01", exchanges=times))


def pretend(optimizer: MultiNodeOptimizer, computing: float, waiting: float) -> None:
    """Let what was measured be this, in seconds, whatever else this machine was doing."""
    assert optimizer._auto is not None
    assert len(optimizer._auto.seconds) >= 6
    optimizer._auto.seconds = [(computing, waiting)]


@dataclass(frozen=True)
class Case:
    """What double_buffering is given, what is measured, and the way that is chosen."""

    given: bool | None
    computing: float
    waiting: float
    way: Way


CASES = [
    Case(None, 0.200, 0.001, Way("fp32")),
    Case(None, 0.060, 0.036, Way("bf16")),
    Case(None, 0.024, 0.060, Way("int8", is_late=True)),
    Case(True, 0.060, 0.030, Way("bf16", is_late=True)),
    Case(False, 0.024, 0.060, Way("int8")),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.way))


# -- alike on all ranks -----------------------------------------------------------------------------------------------


class OnItsOwn:
    """What a communicator is for a rank that asks nobody."""

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def broadcast_object(self, obj: Any) -> Any:
        return obj


def check_choice(*, on_their_own: bool = False) -> None:
    """Rank 1 computes for longer than the others, who wait for it."""

    def decide(comm: Communicator) -> tuple[Choice | None, Choice]:
        auto = AutoWire(comm, None)
        if on_their_own:
            auto._comm = OnItsOwn(comm)  # type: ignore[assignment] # has what is used of one
        computing, waiting = (0.060, 0.036) if comm.rank == 1 else (0.001, 0.095)
        auto.seconds = [(computing, waiting)]
        auto.decide(205)
        return auto.choice, choose(ways_for(None), Measured(computing, waiting, 205), TIMES)

    decided = on_ranks(RANKS, decide)
    alone = [own for _, own in decided]
    assert alone[0].way != alone[1].way
    assert [chosen for chosen, _ in decided] == [alone[1]] * RANKS


def test_all_ranks_choose_by_the_slowest() -> None:
    check_choice()


def test_red_twin_ranks_choose_on_their_own() -> None:
    with pytest.raises(AssertionError):
        check_choice(on_their_own=True)


def test_a_slow_rank_chooses_what_the_others_do(capfd: pytest.CaptureFixture[str]) -> None:
    def check(comm: Communicator) -> tuple[Choice | None, list[Tensor]]:
        ledger = Ledger(comm, "auto", double_buffering=None)
        for step in range(STEPS + 3):
            if comm.rank == 1:
                time.sleep(0.003)
            ledger.step(step)
        return ledger.optimizer.chosen, ledger.check()

    found = on_ranks(RANKS, check)
    chosen = found[0][0]
    assert chosen is not None
    assert [its for its, _ in found] == [chosen] * RANKS
    assert_same_bits([values for _, values in found])
    said = capfd.readouterr().err.splitlines()
    assert said == [f"renkei: gradients go in {chosen.way}, by wire=auto: {chosen.why}"]


# -- the same training ------------------------------------------------------------------------------------------------


def one_matrix() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose gradients are in one bucket in one order, whenever an optimizer learns it."""
    torch.manual_seed(0)
    model = nn.Linear(67, 5, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 335).sin().view(5, 67))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: MultiNodeOptimizer, comm: Communicator, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(11, 67, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def scripted(comm: Communicator, case: Case) -> list[Tensor]:
    """Two optimizers, one after the other."""
    model, inner = one_matrix()
    late = bool(case.given)
    first = MultiNodeOptimizer(inner, comm, model=model, double_buffering=late)
    train(model, first, comm, range(STEPS))
    first.flush()
    first.close()
    second = MultiNodeOptimizer(inner, comm, model=model, wire=case.way.wire, double_buffering=case.way.is_late)
    train(model, second, comm, range(STEPS, 2 * STEPS))
    second.flush()
    return [model.weight.detach()]


def by_itself(comm: Communicator, case: Case) -> list[Tensor]:
    model, inner = one_matrix()
    optimizer = MultiNodeOptimizer(inner, comm, model=model, wire="auto", double_buffering=case.given)
    train(model, optimizer, comm, range(STEPS))
    assert optimizer.chosen is None
    pretend(optimizer, case.computing, case.waiting)
    if case.given:
        optimizer.flush()
    train(model, optimizer, comm, range(STEPS, 2 * STEPS))
    optimizer.flush()
    assert optimizer.chosen is not None
    assert optimizer.chosen.way == case.way
    assert optimizer.double_buffering == case.way.is_late
    return [model.weight.detach()]


def check_same_training(case: Case) -> None:
    found = on_ranks(RANKS, lambda comm: by_itself(comm, case)) + on_ranks(RANKS, lambda comm: scripted(comm, case))
    assert_same_bits(found)


@every_case
def test_before_and_after_training_is_what_it_is_with_that_way_given(case: Case) -> None:
    check_same_training(case)


def test_red_twin_chosen_but_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiNodeOptimizer, "_replan", lambda *_: None)
    with pytest.raises(AssertionError):
        check_same_training(CASES[2])


@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=lambda case: str(case.way))
def test_every_gradient_is_used_once(case: Case) -> None:
    def check(comm: Communicator) -> list[Tensor]:
        ledger = Ledger(comm, "auto", double_buffering=case.given)
        for step in range(STEPS + 4):
            if step == STEPS:
                pretend(ledger.optimizer, case.computing, case.waiting)
            ledger.step(step)
        assert copy.deepcopy(ledger.optimizer)._wire_format == ledger.optimizer._wire_format
        return ledger.check()

    assert_same_bits(on_ranks(RANKS, check))


# -- resumed ----------------------------------------------------------------------------------------------------------


def resumed(comm: Communicator, at: int | None, case: Case) -> list[Tensor]:
    """Train, but from step `at` on with a new model and optimizer that have loaded what the first ones saved."""
    ledger = Ledger(comm, "auto", double_buffering=case.given)
    for step in range(STEPS + 6):
        if step == at:
            file = io.BytesIO()
            torch.save((ledger.model.state_dict(), ledger.optimizer.state_dict()), file)
            file.seek(0)
            model, state = torch.load(file, weights_only=True)
            chosen = ledger.optimizer.chosen
            ledger = Ledger(comm, "auto", double_buffering=case.given)
            ledger.model.load_state_dict(model)
            ledger.optimizer.load_state_dict(state)
            assert ledger.optimizer.chosen == chosen
        if step == STEPS:
            pretend(ledger.optimizer, case.computing, case.waiting)
        ledger.step(step)
    assert ledger.optimizer.chosen is not None
    assert ledger.optimizer.chosen.way == case.way
    return [parameter.detach().clone() for parameter in ledger.model.all]


def check_resumed(*places: int, case: Case = CASES[2]) -> None:
    straight = on_ranks(RANKS, lambda comm: resumed(comm, None, case))
    for at in places:
        assert_same_bits(straight + on_ranks(RANKS, partial(resumed, at=at, case=case)))


def test_a_resumed_run_goes_the_same_way_from_the_same_step_on() -> None:
    check_resumed(3, STEPS, STEPS + 4)


def test_red_twin_the_choice_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoWire, "restore", lambda self, state: self.way)
    with pytest.raises(AssertionError):
        check_resumed(STEPS + 4)


def test_rank_0_s_state_is_enough_for_the_choice() -> None:
    def check(comm: Communicator) -> Way:
        ledger = Ledger(comm, "auto", double_buffering=False)
        for step in range(STEPS + 1):
            if step == STEPS:
                pretend(ledger.optimizer, 0.060, 0.036)
            ledger.step(step)
        state = ledger.optimizer.state_dict()
        if comm.rank != 0:
            del state["renkei_wire"]
        other = Ledger(comm, "auto", double_buffering=False)
        other.optimizer.load_state_dict(state)
        assert other.optimizer.chosen is not None
        return other.optimizer.chosen.way

    assert on_ranks(RANKS, check) == [Way("bf16")] * RANKS


# -- where it can't, or may not ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["nothing", "an old file", "another communicator"])
def test_without_what_was_measured_it_is_fp32_and_says_how_to_measure(
    found: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if found == "nothing":
        file.unlink()
    elif found == "an old file":
        save(None)
    else:
        save(TIMES, "flat/gloo")

    def check(comm: Communicator) -> list[Tensor]:
        ledger = Ledger(comm, "auto", double_buffering=None)
        for step in range(STEPS + 2):
            ledger.step(step)
        assert ledger.optimizer.chosen is not None
        assert ledger.optimizer.chosen.way == Way("fp32")
        return ledger.check()

    assert_same_bits(on_ranks(RANKS, check))
    (said,) = capfd.readouterr().err.splitlines()
    assert "gradients go in fp32" in said
    assert f"{SPEC}; measure with `renkei bench all-reduce --save`" in said


def test_a_file_that_makes_no_sense_is_told_on_all_ranks(file: Path) -> None:
    file.write_text("[]")
    errors = on_ranks(RANKS, lambda comm: error_of(lambda: Ledger(comm, "auto", double_buffering=None)))
    assert {type(error) for error in errors} == {renkei.UsageError}
    assert len({str(error) for error in errors}) == 1


def test_one_rank_has_nothing_to_choose(capfd: pytest.CaptureFixture[str]) -> None:
    def check(comm: Communicator) -> Choice | None:
        ledger = Ledger(comm, "auto", double_buffering=None)
        for step in range(STEPS + 2):
            ledger.step(step)
        ledger.check()
        return ledger.optimizer.chosen

    assert on_ranks(1, check) == [None]
    assert capfd.readouterr().err == ""


def test_what_must_have_the_same_bits_everywhere_can_not_go_by_measurements() -> None:
    errors = on_ranks(2, lambda comm: error_of(lambda: Ledger(comm, "auto")), virtual_ranks=4)
    assert all("virtual_ranks asks for the same bits" in str(error) for error in errors)


def test_ranks_must_all_leave_it_open() -> None:
    errors = on_ranks(2, lambda comm: error_of(lambda: Ledger(comm, ("auto", "fp32")[comm.rank])))
    assert all("rank 1 has chosen wire=Fp32()" in str(error) for error in errors)


def test_a_training_that_can_not_be_late_is_not() -> None:
    """In one of its steps there are two exchanges."""

    def check(comm: Communicator) -> Way:
        ledger = Ledger(comm, "auto", double_buffering=None)
        for step in range(STEPS + 4):
            ledger.optimizer.zero_grad()
            ledger.loss(step).backward()
            if step >= 4:
                ledger.loss(step).backward()
            ledger.optimizer.step()
            if step == STEPS - 1:
                pretend(ledger.optimizer, 0.024, 0.060)
        assert ledger.optimizer.chosen is not None
        return ledger.optimizer.chosen.way

    assert on_ranks(RANKS, check) == [Way("int8")] * RANKS


@pytest.mark.parametrize("at", [4, STEPS + 2])
def test_double_buffering_that_is_set_stays_as_it_is(at: int) -> None:
    def check(comm: Communicator) -> list[Tensor]:
        ledger = Ledger(comm, "auto", double_buffering=None)
        for step in range(at + STEPS + 2):
            if step == at:
                ledger.optimizer.double_buffering = True
            auto = ledger.optimizer._auto
            assert auto is not None
            if auto.is_due:
                pretend(ledger.optimizer, 0.024, 0.060)
            ledger.step(step)
        assert ledger.optimizer.chosen is not None
        assert ledger.optimizer.chosen.way == Way("int8", is_late=True)
        assert ledger.optimizer.double_buffering
        return ledger.check()

    assert_same_bits(on_ranks(RANKS, check))
