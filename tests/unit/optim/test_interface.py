"""Wrapped, an optimizer is used by the rest of torch as before: schedules, hooks, checkpoints, copies, averages."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from exactness.one_process import (
    adamw,
    assert_close,
    assert_same_bits,
    build,
    error_of,
    loss_of,
    mlp,
    on_ranks,
    samples,
    sgd,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.optim.multi_node import MultiNodeOptimizer

STEPS = 8


def wrap(comm: Communicator, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> tuple[nn.Module, Any]:
    model = build(mlp).double()
    return model, MultiNodeOptimizer(optimizer(model.parameters()), comm, model=model)


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    loss = loss_of(model, *samples(6, seed=seed))
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, seed=step)
        optimizer.step()


# -- learning-rate schedules ------------------------------------------------------------------------------------------


def reduce_on_plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)


def sequential(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS + 1),
    "ReduceLROnPlateau": reduce_on_plateau,
    "SequentialLR": sequential,
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=3),
}


def train_with_schedule(name: str, model: nn.Module, optimizer: Any) -> tuple[list[Tensor], list[tuple[float, Any]]]:
    schedule = SCHEDULES[name](optimizer)
    settings = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = backward(model, seed=step)
        optimizer.step()
        schedule.step(*([loss] if name == "ReduceLROnPlateau" else []))
        group = optimizer.param_groups[0]
        settings.append((group["lr"], group.get("momentum", group.get("betas"))))
    return values(model), settings


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_move_learning_rate_and_momentum_as_without_wrapper(
    name: str, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """And without a warning: torch warns of a schedule that steps before an optimizer that it doesn't recognise."""
    ((found, settings),) = on_ranks(1, lambda comm: train_with_schedule(name, *wrap(comm, optimizer)))
    model = build(mlp).double()
    expected, expected_settings = train_with_schedule(name, model, optimizer(model.parameters()))
    assert settings == expected_settings
    assert len({lr for lr, _ in settings}) > 1
    assert_close(found, expected, within=1e-12)


# -- hooks ------------------------------------------------------------------------------------------------------------

HOOKS = {
    "register_step_pre_hook": lambda optimizer: optimizer.step(),
    "register_step_post_hook": lambda optimizer: optimizer.step(),
    "register_state_dict_pre_hook": lambda optimizer: optimizer.state_dict(),
    "register_state_dict_post_hook": lambda optimizer: optimizer.state_dict(),
    "register_load_state_dict_pre_hook": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "register_load_state_dict_post_hook": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_are_called_once_until_they_are_removed(register: str) -> None:
    def on_rank(comm: Communicator) -> int:
        _, optimizer = wrap(comm)
        calls = []
        handle = getattr(optimizer, register)(lambda *_: calls.append(1))
        HOOKS[register](optimizer)
        handle.remove()
        HOOKS[register](optimizer)
        return len(calls)

    assert on_ranks(1, on_rank) == [1]


def test_hooks_before_step_see_the_mean() -> None:
    def on_rank(comm: Communicator) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(float(weight.grad)))
        if comm.rank:
            (weight * comm.rank).sum().backward()
        optimizer.step()
        return seen

    assert on_ranks(3, on_rank) == [[1.0]] * 3


# -- state ------------------------------------------------------------------------------------------------------------


def through_torch_save(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_training_goes_on_from_a_saved_state(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model, wrapped = wrap(comm, optimizer)
        train(model, wrapped, 3)
        saved = copy.deepcopy(model.state_dict()), through_torch_save(wrapped)
        train(model, wrapped, 3, first=3)
        resumed, its = wrap(comm, optimizer)
        resumed.load_state_dict(saved[0])
        its.load_state_dict(saved[1])
        train(resumed, its, 3, first=3)
        return values(model), values(resumed)

    for uninterrupted, resumed in on_ranks(2, on_rank):
        assert_same_bits([uninterrupted, resumed])


def test_the_state_is_that_of_the_inner_optimizer() -> None:
    """So it can be loaded without Renkei, and the other way round."""

    def on_rank(comm: Communicator) -> None:
        model, optimizer = wrap(comm)
        train(model, optimizer, 2)
        plain = sgd(build(mlp).double().parameters())
        plain.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
        assert optimizer.state is optimizer.inner.state

    on_ranks(1, on_rank)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_distributed_checkpoint_gets_and_sets_the_state(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model, wrapped = wrap(comm, optimizer)
        train(model, wrapped, 3)
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(get_optimizer_state_dict(model, wrapped))
        assert "0.weight" in saved[1]["state"]
        train(model, wrapped, 3, first=3)
        resumed, its = wrap(comm, optimizer)
        resumed.load_state_dict(saved[0])
        set_optimizer_state_dict(resumed, its, saved[1])
        train(resumed, its, 3, first=3)
        return values(model), values(resumed)

    for uninterrupted, resumed in on_ranks(2, on_rank):
        assert_same_bits([uninterrupted, resumed])


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_steps_the_copied_parameters_and_no_others() -> None:
    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model, optimizer = wrap(comm)
        train(model, optimizer, 2)
        before = values(model)
        other, its = copy.deepcopy((model, optimizer))
        train(other, its, 2, first=2)
        after = values(model)
        train(model, optimizer, 2, first=2)
        assert_same_bits([before, after])
        return before, values(other), values(model)

    for before, copied, original in on_ranks(2, on_rank):
        assert_same_bits([original, copied])
        assert not torch.equal(before[0], original[0])


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, lambda each: torch.save(each, io.BytesIO())])
def test_pickling_is_refused_with_what_to_do(how: Callable[[Any], object]) -> None:
    (error,) = on_ranks(1, lambda comm: error_of(lambda: how(wrap(comm)[1])))
    assert isinstance(error, UsageError)
    assert "state_dict()" in str(error)


def test_averaged_models_follow_the_parameters() -> None:
    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model, optimizer = wrap(comm)
        mean = AveragedModel(model)
        moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        seen = []
        for step in range(3):
            train(model, optimizer, 1, first=step)
            mean.update_parameters(model)
            moving.update_parameters(model)
            seen.append(values(model))
        expected = [torch.stack(each).mean(0) for each in zip(*seen, strict=True)]
        return values(mean.module), expected, values(moving.module)

    results = on_ranks(2, on_rank)
    for found, expected, _ in results:
        assert_close(found, expected, within=1e-12)
    assert_same_bits([moving for _, _, moving in results])


# -- the object itself ------------------------------------------------------------------------------------------------


def test_it_is_an_optimizer_that_says_what_it_wraps() -> None:
    def on_rank(comm: Communicator) -> None:
        _, optimizer = wrap(comm)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert repr(optimizer).startswith("MultiNodeOptimizer(SGD")
        assert optimizer.defaults is optimizer.inner.defaults
        optimizer.param_groups[0]["lr"] = 0.25
        assert optimizer.inner.param_groups[0]["lr"] == 0.25
        optimizer.param_groups = [*optimizer.param_groups]
        assert optimizer.inner.param_groups is optimizer.param_groups

    on_ranks(1, on_rank)


def test_what_is_no_optimizer_is_refused() -> None:
    (error,) = on_ranks(1, lambda comm: error_of(lambda: MultiNodeOptimizer(nn.Linear(1, 1), comm)))
    assert isinstance(error, UsageError)
    assert "Linear" in str(error)


def test_time_spent_waiting_is_told_and_survives_a_new_plan() -> None:
    def on_rank(comm: Communicator) -> list[float]:
        model, optimizer = wrap(comm)
        waited = [optimizer.seconds_waited]
        for step in range(4):
            train(model, optimizer, 1, first=step)
            waited.append(optimizer.seconds_waited)
        return waited

    for waited in on_ranks(2, on_rank):
        assert waited[0] == 0
        assert waited == sorted(set(waited))


def test_after_close_gradients_stay_on_their_rank() -> None:
    def on_rank(comm: Communicator) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        found = []
        for _ in range(2):
            weight.grad = None
            (weight * comm.rank).sum().backward()
            found.append(float(weight.grad))
            optimizer.close()
        return found

    assert on_ranks(2, on_rank) == [[0.5, 0.0], [0.5, 1.0]]


def check_is_freed_when_dropped() -> None:
    def on_rank(comm: Communicator) -> list[weakref.ref[Any]]:
        model, optimizer = wrap(comm)
        train(model, optimizer, 3)
        return [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer._reducer)]

    (references,) = on_ranks(1, on_rank)
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_model_and_buckets_are_freed_when_model_and_optimizer_are_dropped() -> None:
    check_is_freed_when_dropped()


def test_red_twin_hooks_that_keep_what_they_belong_to_alive_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.reducer.weakref", SimpleNamespace(ref=lambda reducer: lambda: reducer))
    with pytest.raises(AssertionError):
        check_is_freed_when_dropped()
