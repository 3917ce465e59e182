"""What is late or owed comes through whatever else happens: other optimizers, overflows, resting layers, loading."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import renkei
from exactness.ledger import STEPS, Ledger, coefficients
from exactness.one_process import assert_same_bits, on_ranks
from renkei.communicators.communicator import Communicator
from renkei.gradients.compression.feedback import Feedback
from renkei.gradients.compression.formats import Bf16, Fp32, Int8, PowerSgd, WireFormat
from renkei.optim.multi_node import MultiNodeOptimizer

WIRES = [Fp32(), Int8(block=8), PowerSgd(rank=1)]


def name_of(wire: WireFormat) -> str:
    return type(wire).__name__


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("wire", [Bf16(), *WIRES], ids=name_of)
def test_a_rank_may_reach_only_some_of_several_optimizers(wire: WireFormat, is_late: bool) -> None:
    def check(comm: Communicator) -> None:
        first, second = (Ledger(comm, wire, double_buffering=is_late) for _ in range(2))
        for step in range(3):
            for ledger in (first, second):
                ledger.optimizer.zero_grad()
            both = comm.rank != 1
            (first.loss(step) + (second.loss(step) if both else 0.0)).backward()
            for ledger in (first, second):
                ledger.optimizer.step()

    on_ranks(2, check)


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_one_rank_may_save_alone(wire: WireFormat) -> None:
    def check(comm: Communicator) -> list[Any]:
        ledger = Ledger(comm, wire, double_buffering=True)
        for step in range(STEPS):
            ledger.step(step)
            if comm.rank == 0:
                ledger.optimizer.state_dict()
        return ledger.check()

    assert_same_bits(on_ranks(3, check))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("wire", WIRES[1:], ids=name_of)
def test_overflows_in_the_first_steps_are_forgotten(wire: WireFormat, is_late: bool) -> None:
    def check(comm: Communicator) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        ledger = Ledger(comm, wire, scaler, double_buffering=is_late)
        for step in range(STEPS):
            ledger.optimizer.zero_grad()
            scaler.scale(ledger.loss(step) * (math.inf if step < 2 and comm.rank == 1 else 1.0)).backward()
            scaler.step(ledger.optimizer)
            scaler.update()
            if step > 1:
                ledger.expect(step, [1.0] * comm.size)
        return ledger.check()

    assert_same_bits(on_ranks(2, check))


def resting(ledger: Ledger) -> list[Any]:
    """One parameter is used by nobody in some steps."""
    for step in range(STEPS):
        ledger.optimizer.zero_grad()
        loss = ledger.loss(step)
        if 2 < step < 6:
            loss = loss - (ledger.model.all[1] * coefficients(step, ledger.comm.rank)[1]).sum()
            parts = zip(ledger.model.all, coefficients(step, ledger.comm.rank), strict=True)
            loss = torch.stack([(p * c).sum() for at, (p, c) in enumerate(parts) if at != 1]).sum()
        loss.backward()
        ledger.optimizer.step()
        kept = ledger.due[1].clone()
        ledger.expect(step, [1.0] * ledger.comm.size)
        if 2 < step < 6:
            ledger.due[1] = kept
    return ledger.check()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("wire", WIRES[1:], ids=name_of)
def test_what_is_owed_of_a_layer_that_rests_stays_owed(wire: WireFormat, is_late: bool) -> None:
    assert_same_bits(on_ranks(3, lambda comm: resting(Ledger(comm, wire, double_buffering=is_late))))


def test_red_twin_what_is_owed_is_lost_when_a_layer_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feedback, "leave", lambda *_: None)
    with pytest.raises(AssertionError):
        on_ranks(3, lambda comm: resting(Ledger(comm, Int8(block=8))))


def test_loading_forgets_what_was_late_and_owed_before() -> None:
    def check(comm: Communicator) -> list[Any]:
        ledger = Ledger(comm, Int8(block=8), double_buffering=True)
        ledger.step(0)
        model, optimizer, due = copy.deepcopy((ledger.model.state_dict(), ledger.optimizer.state_dict(), ledger.due))
        ledger.optimizer.zero_grad()
        (ledger.loss(1) * math.nan).backward()
        ledger.optimizer.step()
        ledger.model.load_state_dict(model)
        ledger.optimizer.load_state_dict(optimizer)
        ledger.due = due
        for step in range(2, STEPS):
            ledger.step(step)
        return ledger.check()

    assert_same_bits(on_ranks(2, check))


def test_a_state_with_other_parameters_frozen_is_not_taken(capfd: pytest.CaptureFixture[str]) -> None:
    def check(comm: Communicator) -> bool:
        saved = Ledger(comm, double_buffering=True)
        saved.model.all[0].requires_grad_(False)
        saved.step(0)
        saved.step(1)
        other = Ledger(comm, double_buffering=True)
        other.optimizer.load_state_dict(saved.optimizer.state_dict())
        other.optimizer.flush()
        return all(bool(parameter.eq(0).all()) for parameter in other.model.all)

    assert on_ranks(2, check) == [True, True]
    assert "are not restored" in capfd.readouterr().err


def test_flush_in_the_midst_of_a_step_is_refused() -> None:
    def check(comm: Communicator) -> None:
        ledger = Ledger(comm, double_buffering=True)
        ledger.step(0)
        ledger.optimizer.zero_grad()
        ledger.loss(1).backward()
        with pytest.raises(renkei.UsageError, match=r"between backward\(\) and step\(\)"):
            ledger.optimizer.flush()
        ledger.optimizer.step()
        ledger.expect(1, [1.0] * comm.size)
        ledger.check()
        ledger.optimizer.zero_grad()
        with ledger.optimizer.accumulate():
            ledger.loss(2).backward()
            with pytest.raises(renkei.UsageError):
                ledger.optimizer.double_buffering = False

    on_ranks(2, check)


def test_what_is_owed_is_paid_also_when_double_buffering_ends() -> None:
    def check(comm: Communicator) -> list[Any]:
        ledger = Ledger(comm, Int8(block=8), double_buffering=True)
        for step in range(STEPS):
            ledger.step(step)
        ledger.optimizer.double_buffering = False
        feedback = ledger.optimizer.state_dict()["renkei"]["turns"]["feedback"]
        assert feedback[0]["owed"]["settled"]
        assert not feedback[1]["owed"]["settled"]
        ledger.step(STEPS)
        return ledger.check()

    assert_same_bits(on_ranks(3, check))


def test_a_copy_sends_and_waits_alike() -> None:
    def check(comm: Communicator) -> str:
        copied = copy.deepcopy(Ledger(comm, Int8(block=8), double_buffering=True).optimizer)
        return f"{copied._wire_format} {copied.double_buffering}"

    assert set(on_ranks(2, check)) == {f"{Int8(block=8)} True"}


def test_a_model_may_change_its_dtype_while_gradients_are_late() -> None:
    def check(comm: Communicator) -> float:
        weight = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(weight.weight)
        optimizer = MultiNodeOptimizer(torch.optim.SGD(weight.parameters(), lr=1.0), comm, double_buffering=True)
        for step in range(4):
            if step == 2:
                weight.double()
            optimizer.zero_grad()
            weight(torch.ones(3, dtype=weight.weight.dtype)).sum().backward()
            optimizer.step()
        optimizer.flush()
        return float(weight.weight.detach()[0, 0])

    assert on_ranks(2, check) == [-4.0, -4.0]


def test_a_failed_backward_pass_ends_a_job_with_late_gradients() -> None:
    def check(comm: Communicator) -> str:
        ledger = Ledger(comm, double_buffering=True)
        for step in range(3):
            ledger.step(step)
        try:
            for step in range(3, 6):
                ledger.optimizer.zero_grad()
                try:
                    loss = ledger.loss(step)
                    if step == 3 and comm.rank == 1:
                        loss.register_hook(lambda gradient: 1 / 0)
                    loss.backward()
                except ZeroDivisionError:
                    continue
                ledger.optimizer.step()
        except renkei.GradientError as error:
            return str(error)
        return "went on"

    said = on_ranks(2, check)
    assert "went on" not in said
