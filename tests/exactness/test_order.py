"""zero_grad, backward, step: called in another order, not equally often, or on the wrong object."""

from __future__ import annotations

from collections.abc import Callable

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
from renkei.errors import GradientError, UsageError
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

INPUTS, TARGET = samples(6)


def backward(model: nn.Module) -> None:
    loss_of(model, INPUTS, TARGET).backward()


# -- ranks that do not do the same ------------------------------------------------------------------------------------


def backward_twice(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    backward(model)


def zero_grad_twice(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    optimizer.zero_grad()


def step_twice(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    optimizer.step()


def freeze(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    model[0].weight.requires_grad_(False)


def backward_seven_times(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    for _ in range(7):
        backward(model)


Extra = Callable[[nn.Module, MultiNodeOptimizer], None]
EXTRAS = [backward_twice, zero_grad_twice, step_twice, freeze, backward_seven_times]


def check_is_noticed(extra: Extra, at_step: int, num_ranks: int = 3, timeout: float = 5.0) -> None:
    """What one rank does in excess is an error on all of them, at the latest in the next step."""

    def train(comm: Communicator) -> list[BaseException | None]:
        model, optimizer = start(comm)

        def step(number: int) -> None:
            optimizer.zero_grad()
            backward(model)
            if (number, comm.rank) == (at_step, 1):
                extra(model, optimizer)
            optimizer.step()

        errors: list[BaseException | None] = []
        for number in range(at_step + 2):
            errors.append(error_of(lambda number=number: step(number)))
            if errors[-1] is not None:
                break
        return errors

    for rank, errors in enumerate(on_ranks(num_ranks, train, timeout=timeout)):
        assert errors[:at_step] == [None] * at_step
        assert isinstance(errors[-1], GradientError), f"rank {rank} got {errors[-1]!r}"
        assert "equally often" in str(errors[-1])


@pytest.mark.parametrize("at_step", [0, 1, 3])
@pytest.mark.parametrize("extra", EXTRAS)
def test_what_one_rank_does_in_excess_is_an_error_on_all(extra: Extra, at_step: int) -> None:
    check_is_noticed(extra, at_step)


@pytest.mark.parametrize("all_do", [1, 6, 7, 30, 31])
def test_one_more_exchange_in_a_step_is_never_taken_for_the_next_steps_first(all_do: int) -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)

        def two_steps() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(all_do + (comm.rank == 1)):
                    backward(model)
                optimizer.step()

        return error_of(two_steps)

    assert all(isinstance(error, GradientError) for error in on_ranks(2, train))


def test_a_forward_pass_that_failed_on_one_rank_is_an_error_on_all() -> None:
    """Nothing told the optimizer of it; but the next exchange does."""

    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)
        for number in range(4):
            optimizer.zero_grad()
            if (number, comm.rank) == (2, 0):
                continue
            error = error_of(lambda: backward(model))
            if error is not None:
                return error
            optimizer.step()
        return None

    assert all(isinstance(error, GradientError) for error in on_ranks(3, train))


@pytest.mark.parametrize("what", ["place", "meeting"])
def test_red_twin_places_that_are_not_compared_are_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "place":
        monkeypatch.setattr("renkei.gradients.ballot._all_equal", lambda *_: True)
        extra: Extra = backward_twice
    else:
        monkeypatch.setattr(Reducer, "meet", lambda self, why: None)
        extra = freeze
    with pytest.raises((AssertionError, UsageError)):
        check_is_noticed(extra, 1, num_ranks=2, timeout=1.0)


# -- all ranks alike --------------------------------------------------------------------------------------------------


def test_zero_grad_of_the_model_is_refused_by_step_with_words_that_say_so() -> None:
    def train(comm: Communicator) -> list[BaseException | None]:
        model, optimizer = start(comm)

        def step() -> None:
            model.zero_grad()
            backward(model)
            optimizer.step()

        return [error_of(step), error_of(step)]

    for first, second in on_ranks(2, train):
        assert first is None  # an optimizer is made ready for its first step
        assert isinstance(second, UsageError)
        assert "zero_grad() of this optimizer, not of the model" in str(second)
        assert "0.weight" in str(second)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_to_none_or_to_zeros_trains_alike(set_to_none: bool) -> None:
    def train(comm: Communicator) -> list[Tensor]:
        model, optimizer = start(comm)
        for _ in range(4):
            optimizer.zero_grad(set_to_none)
            grads = gradients(model)
            assert all(grad is None or not grad.any() for grad in grads)
            loss_of(model, INPUTS[comm.rank :: 2], TARGET[comm.rank :: 2]).backward()
            optimizer.step()
        return values(model)

    model = build(mlp).double()
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        alone.zero_grad()
        backward(model)
        alone.step()
    for found in on_ranks(2, train):
        assert_close(found, values(model), within=1e-12)


def test_step_twice_applies_a_gradient_twice() -> None:
    def train(comm: Communicator) -> list[Tensor]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            optimizer.step()
        return values(model)

    model = build(mlp).double()
    alone = sgd(model.parameters())
    for _ in range(3):
        alone.zero_grad()
        backward(model)
        alone.step()
        alone.step()
    by_rank = on_ranks(2, train)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], values(model), within=1e-12)


def test_zero_grad_twice_changes_nothing() -> None:
    def train(comm: Communicator) -> list[Tensor | None]:
        model, optimizer = start(comm)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.zero_grad()
            loss_of(model, INPUTS[comm.rank :: 2], TARGET[comm.rank :: 2]).backward()
        return gradients(model)

    model = build(mlp).double()
    backward(model)
    for found in on_ranks(2, train):
        assert_close(found, gradients(model), within=1e-12)


def test_step_without_any_gradient_changes_nothing() -> None:
    def train(comm: Communicator) -> bool:
        model, optimizer = start(comm)
        before = values(model)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step()
        return all(map(torch.equal, before, values(model)))

    assert on_ranks(2, train) == [True, True]
