"""Backward passes that don't fit together: with and without weights, too many, or thrown away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor, nn

from exactness.one_process import (
    assert_close,
    error_of,
    gradients,
    gradients_alone,
    loss_of,
    on_ranks,
    samples,
    start,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import GradientError, UsageError
from renkei.optim.multi_node import MultiNodeOptimizer

INPUTS, TARGET = samples(12)


def weighted(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    optimizer.backward(loss_of(model, INPUTS, TARGET), weight=12)


def plain(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    loss_of(model, INPUTS, TARGET).backward()


def without_samples(model: nn.Module, optimizer: MultiNodeOptimizer) -> None:
    optimizer.backward(None)


def nothing(model: nn.Module, optimizer: MultiNodeOptimizer) -> None: ...


Backward = Callable[[nn.Module, MultiNodeOptimizer], None]


@pytest.mark.parametrize("first", [weighted, plain, without_samples])
def test_a_weighted_backward_pass_after_an_exchange_is_refused(first: Backward) -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)
        first(model, optimizer)
        return error_of(lambda: weighted(model, optimizer))

    for error in on_ranks(2, train):
        assert isinstance(error, UsageError)
        assert "accumulate()" in str(error)
        assert "zero_grad()" in str(error)


@pytest.mark.parametrize("order", [(weighted, plain), (plain, weighted), (plain, without_samples)])
def test_weighted_and_plain_losses_in_one_step_are_refused(order: Sequence[Backward]) -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)
        with optimizer.accumulate():
            order[0](model, optimizer)
        return error_of(lambda: order[1](model, optimizer))

    for error in on_ranks(2, train):
        assert isinstance(error, UsageError)
        assert "mixed" in str(error)


def test_a_plain_backward_pass_after_a_weighted_exchange_is_refused_by_step() -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)
        weighted(model, optimizer)
        plain(model, optimizer)
        return error_of(optimizer.step)

    for error in on_ranks(2, train):
        assert isinstance(error, UsageError)
        assert "give each loss of a step its weight" in str(error)


def check_mixed_ranks_are_refused(ways: Sequence[Backward]) -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)

        def step() -> None:
            ways[comm.rank](model, optimizer)
            optimizer.step()

        return error_of(step)

    for error in on_ranks(len(ways), train):
        assert isinstance(error, UsageError)
        assert "some ranks gave their loss a weight and others did not" in str(error)


@pytest.mark.parametrize(
    "ways", [(weighted, plain), (plain, weighted, weighted), (weighted, nothing), (weighted, without_samples, plain)]
)
def test_a_weight_on_some_ranks_only_is_refused_on_all(ways: Sequence[Backward]) -> None:
    check_mixed_ranks_are_refused(ways)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, optimizer = start(comm)
        return error_of(lambda: optimizer.backward(loss_of(model, INPUTS, TARGET), weight=weight))

    (error,) = on_ranks(1, train)
    assert isinstance(error, UsageError)
    assert "weight is" in str(error)


# -- thrown away ------------------------------------------------------------------------------------------------------


def test_what_was_accumulated_can_be_thrown_away_on_all_ranks() -> None:
    def train(comm: Communicator) -> list[Tensor | None]:
        model, optimizer = start(comm)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.accumulate():
                loss_of(model, 5 * INPUTS, TARGET).backward()
            optimizer.zero_grad()
            loss_of(model, INPUTS[comm.rank :: 2], TARGET[comm.rank :: 2]).backward()
        return gradients(model)

    expected = gradients_alone(lambda model: loss_of(model, INPUTS, TARGET))
    for found in on_ranks(2, train):
        assert_close(found, expected, within=1e-12)


def test_one_rank_that_throws_away_what_it_accumulated_is_named_on_the_others() -> None:
    def train(comm: Communicator) -> tuple[BaseException | None, list[Tensor | None]]:
        model, optimizer = start(comm)
        with optimizer.accumulate():
            loss_of(model, INPUTS, TARGET).backward()
        error = None if comm.rank == 1 else error_of(optimizer.step)
        optimizer.zero_grad()
        loss_of(model, INPUTS[comm.rank :: 3], TARGET[comm.rank :: 3]).backward()
        return error, gradients(model)

    results = on_ranks(3, train)
    for rank, (error, _) in enumerate(results):
        assert isinstance(error, GradientError) == (rank != 1)
        assert rank == 1 or "rank 1 gave up" in str(error)
    expected = gradients_alone(lambda model: loss_of(model, INPUTS, TARGET))
    for _, found in results:
        assert_close(found, expected, within=1e-12)


def test_red_twin_mixed_ranks_are_not_refused_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.exchange.Exchange._check", lambda self, tally: None)
    with pytest.raises(AssertionError):
        check_mixed_ranks_are_refused((weighted, plain))
