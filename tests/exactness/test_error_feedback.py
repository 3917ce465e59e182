"""Nothing is lost for good: what was applied, and what ranks owe, is all that there was, whatever happens between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness.ledger import SHAPES, STEPS, Ledger, coefficients, saved_and_loaded
from exactness.one_process import assert_same_bits, on_ranks
from renkei.communicators.communicator import Communicator
from renkei.gradients.compression.feedback import Feedback
from renkei.gradients.compression.formats import Bf16, Fp16, Int8, PowerSgd, WireFormat
from renkei.gradients.compression.tentative import Tentative

FORMATS = [
    Bf16(error_feedback=True),
    Fp16(block=8, error_feedback=True),
    Int8(block=8),
    PowerSgd(rank=1),
]


def plainly(ledger: Ledger) -> None:
    for step in range(STEPS):
        ledger.step(step)


def with_skipped_steps(ledger: Ledger) -> None:
    """An infinity on one rank, and a step that is just not made."""
    for step in range(STEPS):
        if step % 3 == 1:
            ledger.optimizer.zero_grad()
            factor = math.inf if step == 1 and ledger.comm.rank == 1 else 3.0
            (ledger.loss(step + 100) * factor).backward()
        else:
            ledger.step(step)


def with_weights_that_vary(ledger: Ledger) -> None:
    for step in range(STEPS):
        weights = [float((5 * step + 3 * rank) % 4) for rank in range(ledger.comm.size - 1)] + [1.0 + step % 3]
        weight = weights[ledger.comm.rank]
        ledger.optimizer.zero_grad()
        ledger.optimizer.backward(ledger.loss(step) if weight else None, weight=weight)
        ledger.optimizer.step()
        ledger.expect(step, weights)


def with_a_scale_that_changes(ledger: Ledger) -> None:
    scaler = ledger.scaler
    for step in range(STEPS):
        ledger.optimizer.zero_grad()
        scaler.scale(ledger.loss(step)).backward()
        if step == 3 and ledger.comm.rank == 0:
            ledger.optimizer.synchronize()
        scaler.step(ledger.optimizer)
        scaler.update([2.0, 1024.0, 8.0][step % 3])
        ledger.expect(step, [1.0] * ledger.comm.size)


def with_several_backward_passes(ledger: Ledger) -> None:
    for step in range(STEPS):
        ledger.optimizer.zero_grad()
        with ledger.optimizer.accumulate():
            ledger.loss(10 * step).backward()
        ledger.loss(10 * step + 1).backward()
        ledger.loss(10 * step + 2).backward()  # exchanged again
        ledger.optimizer.step()
        for each in range(3):
            ledger.expect(10 * step + each, [1.0] * ledger.comm.size)


def with_a_parameter_that_comes_later(ledger: Ledger) -> None:
    for step in range(STEPS):
        late = ledger.model.all[1].requires_grad_(step > 2)
        ledger.step(step)
        if not late.requires_grad:
            ledger.due[1].zero_()


STORIES = [
    plainly,
    with_skipped_steps,
    with_weights_that_vary,
    with_a_scale_that_changes,
    with_several_backward_passes,
    with_a_parameter_that_comes_later,
]

Story = Callable[[Ledger], None]


def tell(story: Story, wire: WireFormat, num_ranks: int) -> list[list[Tensor]]:
    def on_rank(comm: Communicator) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if story is with_a_scale_that_changes else None
        ledger = Ledger(comm, wire, scaler)
        story(ledger)
        return ledger.check()

    return on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("wire", [FORMATS[0], *FORMATS[2:]], ids=lambda wire: type(wire).__name__)
@pytest.mark.parametrize("story", STORIES)
def test_what_was_applied_and_is_owed_is_all_there_was(story: Story, wire: WireFormat) -> None:
    assert_same_bits(tell(story, wire, 3))


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: type(wire).__name__)
def test_one_rank_owes_nothing(wire: WireFormat) -> None:
    (parameters,) = tell(plainly, wire, 1)
    for at, parameter in enumerate(parameters):
        alone = torch.zeros(SHAPES[at])
        for step in range(STEPS):
            alone = alone - coefficients(step, 0)[at]
        assert torch.equal(parameter, alone)


def test_over_many_steps_little_is_owed() -> None:
    """So error feedback does more than keep the books: the loss does not pile up."""

    def on_rank(comm: Communicator) -> float:
        ledger = Ledger(comm, Int8(block=8))
        for step in range(100):
            ledger.step(step)
        ledger.check()
        return max(float(ledger.owed(at).abs().max()) for at in range(len(SHAPES)))

    assert max(on_ranks(2, on_rank)) < 0.05  # a gradient of 5 is as large as they come, and coded in steps of 5 / 127


# -- red twins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "where", "what"),
    [
        (with_skipped_steps, Tentative, "forget"),
        (with_weights_that_vary, Feedback, "reweigh"),
        (with_a_scale_that_changes, Feedback, "follow"),
        (plainly, Feedback, "restore"),
        (with_a_parameter_that_comes_later, Feedback, "restore"),
        (plainly, Feedback, "settle"),
    ],
)
def test_red_twin_a_wrong_entry_is_seen(monkeypatch: pytest.MonkeyPatch, story: Story, where: type, what: str) -> None:
    settle = Tentative.settle
    if what == "forget":
        monkeypatch.setattr(Tentative, "forget", lambda self: setattr(self, "_before", None))
        monkeypatch.setattr(Tentative, "settle", lambda self: (settle(self), setattr(self, "pending", None)))
    else:
        monkeypatch.setattr(where, what, lambda *_: None)
    with pytest.raises(AssertionError):
        tell(story, Int8(block=8), 2)


# -- saved and loaded ---------------------------------------------------------------------------------------------


def without_what_is_owed(state: Any) -> Any:
    return {name: value for name, value in state.items() if name != "renkei"}


@pytest.mark.parametrize("at", [1, STEPS])
@pytest.mark.parametrize("wire", [*FORMATS[1:], Bf16()], ids=repr)
def test_a_resumed_run_has_the_same_bits(wire: WireFormat, at: int) -> None:
    straight = on_ranks(3, lambda comm: saved_and_loaded(comm, -1, wire=wire))
    resumed = on_ranks(3, lambda comm: saved_and_loaded(comm, at, wire=wire))
    assert_same_bits(straight + resumed)


def test_red_twin_what_is_owed_matters_for_that() -> None:
    straight = on_ranks(3, lambda comm: saved_and_loaded(comm, -1, wire=Int8()))
    resumed = on_ranks(3, lambda comm: saved_and_loaded(comm, STEPS, without_what_is_owed, wire=Int8()))
    with pytest.raises(AssertionError):
        assert_same_bits(straight + resumed)


def test_another_ranks_state_is_not_taken_for_ones_own(capfd: pytest.CaptureFixture[str]) -> None:
    """All load what rank 0 saved: nothing is owed then, on any rank, and that is said once."""

    def on_rank(comm: Communicator) -> Any:
        ledger = Ledger(comm, Int8())
        ledger.step(0)
        ledger.optimizer.load_state_dict(comm.broadcast_object(ledger.optimizer.state_dict()))
        ledger.step(1)
        return ledger.optimizer.state_dict()["renkei"]["turns"]["feedback"][0]["owed"]["settled"] != {}

    assert on_ranks(3, on_rank) == [True] * 3
    assert capfd.readouterr().err.count("rank 1 has loaded no state of its own") == 1
