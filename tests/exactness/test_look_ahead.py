"""Late gradients, computed where each rank's own last ones would lead: what that is, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    CLASSES,
    FEATURES,
    Training,
    adamw,
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
from renkei.optim.look_ahead import LookAhead
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_SAMPLES = 13
STEPS = 15
Make = Callable[[Any], torch.optim.Optimizer]


def step_of(
    optimizer: MultiNodeOptimizer, model: nn.Module, inputs: Tensor, target: Tensor, *, forward_first: bool = False
) -> None:
    weight = len(target)
    if forward_first and weight:
        loss = loss_of(model, inputs, target)
        optimizer.zero_grad()
    else:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, target) if weight else None
    optimizer.backward(loss, weight=weight)
    optimizer.step()


def on_rank(
    comm: Communicator, sizes: Sequence[int], make: Make = sgd, *, forward_first: bool = False, **how: Any
) -> list[Tensor]:
    model = build(mlp).double()
    optimizer = MultiNodeOptimizer(make(model.parameters()), comm, model=model, double_buffering=True, **how)
    mine = slice_of(comm.rank, sizes)
    for step in range(STEPS):
        inputs, target = (whole[mine] for whole in samples(NUM_SAMPLES, seed=1 + step))
        step_of(optimizer, model, inputs, target, forward_first=forward_first)
    optimizer.flush()
    return values(model)


def alone(sizes: Sequence[int], make: Make = sgd) -> list[Tensor]:
    """The same in one process, written down plainly: for each rank a copy of model and optimizer is stepped ahead."""
    model = build(mlp).double()
    optimizer = make(model.parameters())
    late: list[Tensor] | None = None
    own: list[list[Tensor] | None] = [None] * len(sizes)
    for step in range(STEPS):
        inputs, target = samples(NUM_SAMPLES, seed=1 + step)
        gradients: list[list[Tensor] | None] = []
        for rank, size in enumerate(sizes):
            ahead, its = copy.deepcopy((model, optimizer))
            if own[rank] is not None:
                use(its, ahead, own[rank])
            mine = slice_of(rank, sizes)
            loss = loss_of(ahead, inputs[mine], target[mine]) if size else None
            gradients.append(None if loss is None else list(torch.autograd.grad(loss, list(ahead.parameters()))))
        if late is not None:
            use(optimizer, model, late)
        own = gradients
        late = mean(gradients, sizes)
    assert late is not None
    use(optimizer, model, late)
    return values(model)


def use(optimizer: torch.optim.Optimizer, model: nn.Module, gradients: Sequence[Tensor] | None) -> None:
    assert gradients is not None
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def mean(gradients: Sequence[Sequence[Tensor] | None], sizes: Sequence[int]) -> list[Tensor]:
    there = [(each, size) for each, size in zip(gradients, sizes, strict=True) if each is not None]
    return [
        sum((size * each[at] for each, size in there), torch.zeros(())) / sum(sizes) for at in range(len(there[0][0]))
    ]


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("sizes", [[6, 7], [1, 0, 12]], ids=str)
def test_each_rank_computes_where_its_own_gradient_leads(sizes: Sequence[int], make: Make) -> None:
    by_rank = on_ranks(len(sizes), lambda comm: on_rank(comm, sizes, make))
    assert_same_bits(by_rank)
    assert_close(by_rank[0], alone(sizes, make), within=1e-11)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_on_one_rank_nothing_is_late(make: Make) -> None:
    punctual = Training(optimizer=make, num_samples=NUM_SAMPLES, steps=STEPS).alone()
    assert_close(on_ranks(1, lambda comm: on_rank(comm, [NUM_SAMPLES], make))[0], punctual, within=1e-13)


def test_red_twin_without_it_something_is() -> None:
    punctual = Training(num_samples=NUM_SAMPLES, steps=STEPS).alone()
    with pytest.raises(AssertionError):
        assert_close(on_ranks(1, lambda comm: on_rank(comm, [13], look_ahead=False))[0], punctual, within=1e-3)


def test_where_ranks_have_the_same_curvature_nothing_is_late_either() -> None:
    """Squares of a linear model: each rank's gradient is affine in the parameters, with the same matrix."""

    def train(comm: Communicator, late: bool) -> list[Tensor]:
        model = build(lambda: nn.Linear(FEATURES, CLASSES)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model, double_buffering=late)
        inputs, _ = samples(4)
        for step in range(STEPS):
            wanted = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            optimizer.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            optimizer.step()
        optimizer.flush()
        return values(model)

    late = on_ranks(3, lambda comm: train(comm, True))
    assert_close(late[0], on_ranks(3, lambda comm: train(comm, False))[0], within=1e-12)


def test_the_forward_pass_may_come_before_zero_grad_and_gradients_stay_where_they_are() -> None:
    usual = on_ranks(2, lambda comm: on_rank(comm, [6, 7]))
    assert_same_bits([*usual, *on_ranks(2, lambda comm: on_rank(comm, [6, 7], forward_first=True))])


def test_between_steps_parameters_are_the_same_everywhere_and_copies_of_the_model_are_left_alone() -> None:
    def train(comm: Communicator) -> list[list[Tensor]]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model, double_buffering=True)
        found = []
        for step in range(4):
            copied = copy.deepcopy(model)
            pickle.dumps(model)
            copied(samples(2)[0])
            model.eval()
            model(samples(2)[0])  # evaluated, it stays where it is
            model.train()
            with torch.no_grad():
                model(samples(2)[0])
            found.append(values(model))
            step_of(optimizer, model, *samples(3, seed=7 * step + comm.rank))
        return found

    by_rank = on_ranks(2, train)
    for step in range(4):
        assert_same_bits([found[step] for found in by_rank])


@pytest.mark.parametrize("at", [5, 6])
@pytest.mark.parametrize("forget", [None, "own"])
def test_a_resumed_run_has_the_same_bits_if_nothing_is_forgotten(at: int, forget: str | None) -> None:
    def train(comm: Communicator, saves_at: int) -> list[Tensor]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(adamw(model.parameters()), comm, model=model, double_buffering=True)
        for step in range(11):
            if step == saves_at:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                if forget is not None:
                    saved[1]["renkei"]["turns"][forget] = None
                optimizer.close()
                model = build(mlp, seed=3).double()
                optimizer = MultiNodeOptimizer(adamw(model.parameters()), comm, model=model, double_buffering=True)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            step_of(optimizer, model, *samples(3, seed=7 * step + comm.rank))
        optimizer.flush()
        return values(model)

    whole, resumed = (on_ranks(2, lambda comm, when=when: train(comm, when)) for when in (-1, at))
    if forget is None:
        assert_same_bits([*whole, *resumed])
    else:
        with pytest.raises(AssertionError):
            assert_same_bits([*whole, *resumed])


def test_a_step_that_is_taken_back_leaves_no_trace() -> None:
    model = build(mlp).double()
    optimizer = adamw(model.parameters())
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    ahead = LookAhead(optimizer)
    for number in range(2):  # before the first step there is no state; after it there is
        before, state = values(model), copy.deepcopy(optimizer.state_dict())
        gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
        ahead.go(list(model.parameters()), gradients)
        there = values(model)
        ahead.go(list(model.parameters()), gradients)  # a second forward pass
        assert_same_bits([there, values(model)])
        assert all(not torch.equal(one, other) for one, other in zip(before, there, strict=True))
        ahead.come_back()
        ahead.come_back()
        assert_same_bits([before, values(model)])
        assert str(optimizer.state_dict()) == str(state)
        assert len(calls) == number
        use(optimizer, model, gradients)
        assert_same_bits([there, values(model)])
