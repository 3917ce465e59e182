"""Gradients that come in other ways than by one plain backward pass of the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    assert_close,
    assert_same_bits,
    gradients,
    gradients_alone,
    loss_of,
    on_ranks,
    samples,
    start,
)
from renkei.communicators.communicator import Communicator
from renkei.gradients.flat import FlatGradients
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3
INPUTS, TARGET = samples(12)

Way = Callable[[nn.Module, Tensor, Tensor], None]


def loss_with_penalty(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """With the norm of the gradient by the inputs, as in WGAN-GP: its graph holds a backward pass."""
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (by_inputs,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return nn.functional.cross_entropy(output, target) + (by_inputs.norm(dim=1) - 1).square().mean()


def plainly(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss_of(model, inputs, target).backward()


def by_hand(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_of(model, inputs, target), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def by_functional_grad(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(model, parameters, (inputs,))
        return nn.functional.cross_entropy(output, target)

    for name, gradient in torch.func.grad(loss)(dict(model.named_parameters())).items():
        model.get_parameter(name).grad = gradient.detach()


def by_per_sample_gradients(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    def loss(parameters: dict[str, Tensor], one: Tensor, its_class: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (one[None],))
        return nn.functional.cross_entropy(output, its_class[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(dict(model.named_parameters()), inputs, target)
    for name, gradient in each.items():
        model.get_parameter(name).grad = gradient.detach().mean(0)


def with_a_graph(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss_of(model, inputs, target).backward(create_graph=True)


def with_a_gradient_penalty(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss_with_penalty(model, inputs, target).backward()


def of_two_losses_at_once(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    torch.autograd.backward([loss_of(model, inputs, target) / 2, loss_of(model, inputs, target) / 2])


def after_looking_with_autograd_grad(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss = loss_of(model, inputs, target)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def on_another_thread(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    thread = threading.Thread(target=plainly, args=(model, inputs, target))
    thread.start()
    thread.join()


def without_grad_mode(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss = loss_of(model, inputs, target)
    with torch.no_grad():
        loss.backward()


def alone(way: Way) -> list[Tensor | None]:
    loss = loss_with_penalty if way is with_a_gradient_penalty else loss_of
    return gradients_alone(lambda model: loss(model, INPUTS, TARGET))


def check_gives_the_mean(way: Way, set_to_none: bool = True) -> None:
    """In three steps, and for a rank that doesn't take the way itself but only joins in."""

    def train(comm: Communicator) -> list[list[Tensor | None]]:
        model, optimizer = start(comm)
        found = []
        for _ in range(3):
            optimizer.zero_grad(set_to_none)
            way(model, INPUTS[comm.rank :: NUM_RANKS], TARGET[comm.rank :: NUM_RANKS])
            optimizer.synchronize()
            found.append(gradients(model))
        return found

    for step in zip(*on_ranks(NUM_RANKS, train), strict=True):
        assert_same_bits(step)
        assert_close(step[0], alone(way), within=1e-12)


WAYS = [
    by_hand,
    by_functional_grad,
    by_per_sample_gradients,
    with_a_graph,
    with_a_gradient_penalty,
    of_two_losses_at_once,
    after_looking_with_autograd_grad,
    on_another_thread,
    without_grad_mode,
]


@pytest.mark.filterwarnings("ignore:Using backward.* will create a reference cycle:UserWarning")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_come_in_any_way_become_the_mean(way: Way, set_to_none: bool) -> None:
    check_gives_the_mean(way, set_to_none)


@pytest.mark.parametrize("way", [plainly, with_a_gradient_penalty])
def test_they_are_the_mean_as_soon_as_backward_returns(way: Way) -> None:
    def train(comm: Communicator) -> list[Tensor | None]:
        model, _ = start(comm)
        way(model, INPUTS[comm.rank :: NUM_RANKS], TARGET[comm.rank :: NUM_RANKS])
        return gradients(model)

    for found in on_ranks(NUM_RANKS, train):
        assert_close(found, alone(way), within=1e-12)


def test_looking_at_gradients_with_autograd_grad_exchanges_nothing() -> None:
    """So a single rank may do it."""

    def train(comm: Communicator) -> list[Tensor | None]:
        model, optimizer = start(comm)
        for _ in range(2):
            optimizer.zero_grad()
            if comm.rank == 1:
                torch.autograd.grad(loss_of(model, INPUTS, TARGET), list(model.parameters()))
            plainly(model, INPUTS[comm.rank :: NUM_RANKS], TARGET[comm.rank :: NUM_RANKS])
        return gradients(model)

    for found in on_ranks(NUM_RANKS, train):
        assert_close(found, alone(plainly), within=1e-12)


def test_gradients_set_by_hand_on_one_rank_count_as_zero_on_the_others() -> None:
    def train(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm)
        for _ in range(2):
            optimizer.zero_grad()
            if comm.rank == 1:
                weight.grad = torch.full_like(weight, 3.0)
            optimizer.step()
        return weight.item()

    assert on_ranks(3, train) == [-2.0] * 3


def test_backward_for_some_inputs_exchanges_these_and_leaves_the_rest_without_gradient() -> None:
    def train(comm: Communicator) -> list[Tensor | None]:
        model, _ = start(comm)
        mine = slice(comm.rank, None, NUM_RANKS)
        loss_of(model, INPUTS[mine], TARGET[mine]).backward(inputs=[model[0].weight, model[2].bias])
        return gradients(model)

    expected = [
        gradient if at in (0, 3) else None
        for at, gradient in enumerate(gradients_alone(lambda model: loss_of(model, INPUTS, TARGET)))
    ]
    for found in on_ranks(NUM_RANKS, train):
        assert_close(found, expected, within=1e-12)


def test_a_tensor_hook_changes_the_gradient_before_it_is_exchanged() -> None:
    def train(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        weight.register_hook(lambda gradient: gradient * (comm.rank + 1))
        MultiNodeOptimizer(torch.optim.SGD([weight]), comm)
        weight.sum().backward()
        return float(weight.grad)

    assert on_ranks(3, train) == [2.0] * 3


def test_gradients_changed_after_backward_are_what_step_uses() -> None:
    def train(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * comm.rank).sum().backward()
            weight.grad *= 10
            optimizer.step()
        return weight.item()

    assert on_ranks(3, train) == [-20.0] * 3


@pytest.mark.filterwarnings("ignore:Using backward.* will create a reference cycle:UserWarning")
def test_the_gradient_of_a_backward_pass_with_a_graph_has_none() -> None:
    def train(comm: Communicator) -> bool:
        model, _ = start(comm)
        with_a_graph(model, INPUTS, TARGET)
        return any(parameter.grad.requires_grad for parameter in model.parameters())

    assert on_ranks(1, train) == [False]


@pytest.mark.parametrize("way", [by_hand, with_a_gradient_penalty])
def test_red_twin_a_gradient_left_out_of_its_bucket_is_seen(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = FlatGradients.pack
    monkeypatch.setattr(FlatGradients, "pack", lambda self, at, scale: None if at == 1 else pack(self, at, scale))
    with pytest.raises(AssertionError):
        check_gives_the_mean(way)
