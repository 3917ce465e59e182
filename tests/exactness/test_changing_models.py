"""Models that change on the way: parameters frozen, thawed and added, and another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    assert_close,
    assert_same_bits,
    build,
    error_of,
    gradients,
    loss_of,
    mlp,
    on_ranks,
    samples,
    sgd,
    start,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3
SHARES = [slice(0, 2), slice(2, 12), slice(12, 12)]

Change = Callable[[nn.Module, Any, int], None]


def freeze_and_thaw(model: nn.Module, optimizer: Any, step: int) -> None:
    if step in (2, 5):
        model[2].requires_grad_(step == 5)


def thaw(model: nn.Module, optimizer: Any, step: int) -> None:
    model[0].requires_grad_(step >= 3)


def add_group(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 2:
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.3})


def check_changes_like_one_process(change: Change, *, in_the_midst: bool = False) -> None:
    """`change` is made before `zero_grad`, or in the midst of a step, between `backward` and `step`."""

    def train(comm: Communicator | None, mine: slice) -> list[Tensor]:
        model = build(mlp).double()
        parameters = model[:4].parameters() if change is add_group else model.parameters()
        optimizer: Any = sgd(parameters)
        if comm is not None:
            optimizer = MultiNodeOptimizer(optimizer, comm, model=model)
        for step in range(7):
            inputs, target = (whole[mine] for whole in samples(12, seed=step))
            if not in_the_midst:
                change(model, optimizer, step)
            optimizer.zero_grad()
            if change is add_group:
                model[4].zero_grad()
            if comm is None:
                loss_of(model, inputs, target).backward()
            else:
                optimizer.backward(loss_of(model, inputs, target) if len(target) else None, weight=len(target))
            if in_the_midst:
                if change is add_group and step == 2:
                    model[4].zero_grad()
                change(model, optimizer, step)
            optimizer.step()
        return values(model)

    by_rank = on_ranks(NUM_RANKS, lambda comm: train(comm, SHARES[comm.rank]))
    assert_same_bits(by_rank)
    assert_close(by_rank[0], train(None, slice(None)), within=1e-12)


@pytest.mark.parametrize("change", [freeze_and_thaw, thaw, add_group])
def test_parameters_may_be_frozen_thawed_and_added(change: Change) -> None:
    check_changes_like_one_process(change)


def test_parameters_may_be_added_in_the_midst_of_a_step() -> None:
    check_changes_like_one_process(add_group, in_the_midst=True)


def test_a_group_may_be_added_while_gradients_accumulate() -> None:
    def on_rank(comm: Communicator) -> list[Tensor | None]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model[:4].parameters()), comm, model=model)
        inputs, target = samples(12)
        with optimizer.accumulate():
            optimizer.backward(loss_of(model, inputs[:4], target[:4]), weight=4)
        optimizer.add_param_group({"params": list(model[4].parameters())})
        optimizer.backward(loss_of(model, inputs[4:], target[4:]), weight=8)
        return gradients(model)[:4]

    model = build(mlp).double()
    loss_of(model, *samples(12)).backward()
    for found in on_ranks(2, on_rank):
        assert_close(found, gradients(model)[:4], within=1e-12)


def test_added_parameters_become_rank_0s() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model, head = build(mlp), build(lambda: nn.Linear(3, 2), seed=comm.rank)
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        optimizer.add_param_group({"params": head.parameters(), "lr": 0.1 * (comm.rank + 1)})
        return [*values(head), torch.tensor(optimizer.param_groups[1]["lr"])]

    by_rank = on_ranks(3, on_rank)
    assert_same_bits(by_rank)
    assert float(by_rank[2][-1]) == pytest.approx(0.1)


def test_a_parameter_thawed_after_zero_grad_is_refused_by_name() -> None:
    """It has no place in a bucket yet; used as it is, its gradient would be another on each rank."""

    def on_rank(comm: Communicator) -> BaseException | None:
        model = build(mlp).double()
        model[2].weight.requires_grad_(False)
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        optimizer.zero_grad()
        model[2].weight.requires_grad_(True)
        loss_of(model, *samples(4, seed=comm.rank)).backward()
        return error_of(optimizer.step)

    for error in on_ranks(2, on_rank):
        assert isinstance(error, UsageError)
        assert "2.weight has a gradient but did not require one" in str(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_may_change_its_dtype(dtype: torch.dtype) -> None:
    def on_rank(comm: Communicator) -> tuple[list[Tensor], bool]:
        model = build(mlp)
        optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
        for step in range(4):
            if step == 2:
                model.to(dtype)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            inputs, target = samples(4, seed=comm.rank, dtype=next(model.parameters()).dtype)
            loss_of(model, inputs, target).backward()
            optimizer.step()
        return values(model), all(parameter.grad.dtype == dtype for parameter in model.parameters())

    results = on_ranks(2, on_rank)
    assert_same_bits([found for found, _ in results])
    assert all(is_right for _, is_right in results)


def test_a_model_changed_between_backward_and_step_keeps_its_gradients() -> None:
    """`module.half()` re-points the data of parameters and gradients alike."""

    def on_rank(comm: Communicator) -> list[Tensor]:
        model, optimizer = start(comm)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, *samples(4, seed=comm.rank)).backward()
            model.float()
            optimizer.step()
            model.double()
        return values(model)

    by_rank = on_ranks(2, on_rank)
    assert_same_bits(by_rank)


# -- red twins --------------------------------------------------------------------------------------------------------


def test_red_twin_a_change_of_structure_that_is_missed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.optim.multi_node.structure_of", lambda optimizer: [])
    with pytest.raises((AssertionError, ValueError)):
        check_changes_like_one_process(thaw)


def test_red_twin_a_new_plan_that_forgets_the_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "take_over", lambda self, other: None)
    with pytest.raises((AssertionError, UsageError)):
        test_a_group_may_be_added_while_gradients_accumulate()


def test_red_twin_gradients_left_in_buffers_that_are_reused_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Reducer.meet

    def without_cloning(self: Reducer, why: int) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        meet(self, why)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    monkeypatch.setattr(Reducer, "meet", without_cloning)
    with pytest.raises(AssertionError):
        check_changes_like_one_process(add_group, in_the_midst=True)
