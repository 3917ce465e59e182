"""Steps made with the gradients of the step before: each is used once, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import renkei
from exactness.ledger import STEPS, Ledger, saved_and_loaded
from exactness.one_process import (
    assert_close,
    assert_same_bits,
    build,
    loss_of,
    mlp,
    on_ranks,
    samples,
    sgd,
    slice_of,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.gradients.compression.formats import Bf16, Fp32, Int8, PowerSgd, WireFormat
from renkei.gradients.turns import Turns
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_SAMPLES = 13


def alone(late_from: int = 0, late_until: int = 20, steps: int = 20) -> list[Tensor]:
    """The parameters after training in one process, where some steps are made with the gradient of the step before."""
    model = build(mlp).double()
    optimizer = sgd(model.parameters())
    late: list[Tensor] | None = None

    def step_with(gradients: Sequence[Tensor] | None) -> None:
        if gradients is not None:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

    for step in range(steps):
        if step == late_until:
            step_with(late)
            late = None
        own = list(torch.autograd.grad(loss_of(model, *samples(NUM_SAMPLES, seed=1 + step)), list(model.parameters())))
        if late_from <= step < late_until:
            step_with(late)
            late = own
        else:
            step_with(own)
    step_with(late)
    return values(model)


def on_rank(comm: Communicator, sizes: Sequence[int], late_from: int = 0, late_until: int = 20) -> list[Tensor]:
    model = build(mlp).double()
    optimizer = MultiNodeOptimizer(
        sgd(model.parameters()), comm, model=model, double_buffering=late_from == 0, look_ahead=False
    )
    mine = slice_of(comm.rank, sizes)
    for step in range(20):
        if step in (late_from, late_until):
            optimizer.double_buffering = step == late_from
        inputs, target = (whole[mine] for whole in samples(NUM_SAMPLES, seed=1 + step))
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, inputs, target) if len(target) else None, weight=len(target))
        optimizer.step()
    optimizer.flush()
    optimizer.flush()  # there is nothing more
    return values(model)


@pytest.mark.parametrize("communicator", ["flat/shared_memory", "naive/gloo", "hierarchical/gloo+gloo"])
@pytest.mark.parametrize("sizes", [[13], [6, 7], [1, 0, 12]], ids=str)
def test_ranks_step_like_one_process_with_the_gradient_before(sizes: Sequence[int], communicator: str) -> None:
    by_rank = on_ranks(len(sizes), lambda comm: on_rank(comm, sizes), communicator=communicator)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], alone(), within=1e-12)


def test_it_can_be_switched_on_and_off() -> None:
    by_rank = on_ranks(3, lambda comm: on_rank(comm, [5, 4, 4], 4, 15))
    assert_same_bits(by_rank)
    assert_close(by_rank[0], alone(4, 15), within=1e-12)


WIRES = [Fp32(), Bf16(error_feedback=True), Int8(block=8), PowerSgd(rank=1)]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: type(wire).__name__)
def test_every_gradient_is_used_once(wire: WireFormat) -> None:
    def check(comm: Communicator) -> list[Tensor]:
        ledger = Ledger(comm, wire, double_buffering=True)
        late = ledger.model.all[1].requires_grad_(False)
        for step in range(STEPS):
            late.requires_grad_(step > 2)
            ledger.step(step)
            if not late.requires_grad:
                ledger.due[1].zero_()
        return ledger.check()

    assert_same_bits(on_ranks(3, check))


@pytest.mark.parametrize("wire", [Fp32(), Int8(block=8)], ids=lambda wire: type(wire).__name__)
def test_a_gradient_is_unscaled_by_the_scale_it_was_made_with(wire: WireFormat) -> None:
    """And one that isn't finite is skipped alone, a step later."""

    def check(comm: Communicator) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        ledger = Ledger(comm, wire, scaler, double_buffering=True)
        for step in range(STEPS):
            ledger.optimizer.zero_grad()
            factor = math.inf if step == 2 and comm.rank == 1 else 1.0
            scaler.scale(ledger.loss(step) * factor).backward()
            scaler.step(ledger.optimizer)
            scaler.update([2.0, 1024.0, 8.0][step % 3])
            if step != 2:
                ledger.expect(step, [1.0] * comm.size)
        return ledger.check()

    assert_same_bits(on_ranks(3, check))


@pytest.mark.parametrize("at", [1, 2, STEPS])
@pytest.mark.parametrize("wire", [Fp32(), Int8(), PowerSgd(rank=1)], ids=lambda wire: type(wire).__name__)
def test_a_resumed_run_has_the_same_bits(wire: WireFormat, at: int) -> None:
    options = {"wire": wire, "double_buffering": True}
    straight = on_ranks(3, lambda comm: saved_and_loaded(comm, -1, **options))
    resumed = on_ranks(3, lambda comm: saved_and_loaded(comm, at, **options))
    assert_same_bits(straight + resumed)


# -- refused ------------------------------------------------------------------------------------------------------


def twice(ledger: Ledger) -> None:
    ledger.optimizer.zero_grad()
    ledger.loss(0).backward()
    ledger.loss(1).backward()


def with_a_closure(ledger: Ledger) -> None:
    ledger.optimizer.zero_grad()
    ledger.optimizer.step(lambda: ledger.loss(0))


@pytest.mark.parametrize(("use", "says"), [(twice, "accumulate"), (with_a_closure, "step\\(closure\\)")])
def test_what_can_not_be_late_is_refused(use: Callable[[Ledger], None], says: str) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(renkei.UsageError, match=says):
            use(Ledger(comm, double_buffering=True))

    on_ranks(2, check)


def test_ranks_must_choose_the_same() -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(renkei.MismatchError, match="rank 1 has chosen wire=Fp32\\(\\), double_buffering=True"):
            Ledger(comm, double_buffering=comm.rank == 1)

    on_ranks(2, check)


# -- red twins ----------------------------------------------------------------------------------------------------


def forgets_one(self: Turns) -> Any:
    self._late, self._sent = None, None
    return False


@pytest.mark.parametrize(
    ("what", "defect"),
    [
        ("take_late", forgets_one),
        ("restore", lambda *_: None),
    ],
)
def test_red_twin_a_gradient_that_is_not_used_is_seen(monkeypatch: pytest.MonkeyPatch, what: str, defect: Any) -> None:
    monkeypatch.setattr(Turns, what, defect)
    by_rank = on_ranks(2, lambda comm: on_rank(comm, [6, 7]))
    with pytest.raises(AssertionError):
        assert_close(by_rank[0], alone(), within=1e-12)
