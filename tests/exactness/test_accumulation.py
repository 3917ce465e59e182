"""Several backward passes in a step: added up on the rank, or exchanged twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    assert_close,
    assert_same_bits,
    build,
    gradients,
    gradients_alone,
    loss_of,
    mlp,
    on_ranks,
    samples,
    start,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

MICRO_BATCHES = [[4, 2], [1], [3, 0, 2], []]  # by rank; the last takes part without samples
INPUTS, TARGET = samples(12)


def micro_batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    begin = sum(map(sum, MICRO_BATCHES[:rank]))
    for size in MICRO_BATCHES[rank]:
        yield INPUTS[begin : begin + size], TARGET[begin : begin + size]
        begin += size


def backward_weighted(model: nn.Module, optimizer: MultiNodeOptimizer, inputs: Tensor, target: Tensor) -> None:
    optimizer.backward(loss_of(model, inputs, target) if len(target) else None, weight=len(target))


def accumulate_all_but_the_last(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    *others, last = [*micro_batches(rank)] or [(INPUTS[:0], TARGET[:0])]
    optimizer.zero_grad()
    with optimizer.accumulate():
        for inputs, target in others:
            backward_weighted(model, optimizer, inputs, target)
    backward_weighted(model, optimizer, *last)


def accumulate_all(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    optimizer.zero_grad()
    with optimizer.accumulate():
        for inputs, target in micro_batches(rank):
            backward_weighted(model, optimizer, inputs, target)
        optimizer.backward(None)
    optimizer.synchronize()


def accumulate_around_zero_grad(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    *others, last = [*micro_batches(rank)] or [(INPUTS[:0], TARGET[:0])]
    with optimizer.accumulate():
        optimizer.zero_grad()
        for inputs, target in others:
            backward_weighted(model, optimizer, inputs, target)
    backward_weighted(model, optimizer, *last)


Way = Callable[[nn.Module, MultiNodeOptimizer, int], None]


def check_accumulates_like_one_process(way: Way, steps: int = 3) -> None:
    def train(comm: Communicator) -> list[list[Tensor | None]]:
        model, optimizer = start(comm)
        found = []
        for _ in range(steps):
            way(model, optimizer, comm.rank)
            found.append(gradients(model))
        return found

    expected = gradients_alone(lambda model: loss_of(model, INPUTS, TARGET))
    for step in zip(*on_ranks(4, train), strict=True):
        assert_same_bits(step)
        assert_close(step[0], expected, within=1e-12)


@pytest.mark.parametrize("way", [accumulate_all_but_the_last, accumulate_all, accumulate_around_zero_grad])
def test_micro_batches_of_any_sizes_add_up_to_the_gradient_of_one_process(way: Way) -> None:
    check_accumulates_like_one_process(way)


def test_accumulated_gradients_are_exchanged_by_step() -> None:
    def train(comm: Communicator) -> list[Tensor]:
        model, optimizer = start(comm)
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.accumulate():
                for inputs, target in micro_batches(comm.rank):
                    backward_weighted(model, optimizer, inputs, target)
                optimizer.backward(None)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    def train_alone() -> list[Tensor]:
        model = build(mlp).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, INPUTS, TARGET).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    by_rank = on_ranks(4, train)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], train_alone(), within=1e-12)


def test_inside_accumulate_gradients_stay_on_their_rank() -> None:
    def train(comm: Communicator) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(torch.optim.SGD([weight]), comm)
        seen = []
        with optimizer.accumulate(), optimizer.accumulate():
            (weight * comm.rank).sum().backward()
            seen.append(float(weight.grad))
            optimizer.synchronize()
            seen.append(float(weight.grad))
        (weight * 10).sum().backward()
        return [*seen, float(weight.grad)]

    assert on_ranks(3, train) == [[rank, rank, 11.0] for rank in range(3)]


def test_accumulate_ends_with_its_block_even_if_that_raises() -> None:
    def train(comm: Communicator) -> bool:
        _, optimizer = start(comm)
        with pytest.raises(ZeroDivisionError), optimizer.accumulate():
            raise ZeroDivisionError
        return optimizer._reducer.accumulating

    assert on_ranks(1, train) == [False]


# -- plain ------------------------------------------------------------------------------------------------------------


def twice(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    loss_of(model, INPUTS[rank::4], TARGET[rank::4]).backward()
    loss_of(model, 2 * INPUTS[rank::4], TARGET[rank::4]).backward()


def accumulated(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    with optimizer.accumulate():
        loss_of(model, INPUTS[rank::4], TARGET[rank::4]).backward()
    loss_of(model, 2 * INPUTS[rank::4], TARGET[rank::4]).backward()


def once_then_accumulated(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    loss_of(model, INPUTS[rank::4], TARGET[rank::4]).backward()
    with optimizer.accumulate():
        loss_of(model, 2 * INPUTS[rank::4], TARGET[rank::4]).backward()
    optimizer.synchronize()


def with_a_retained_graph(model: nn.Module, optimizer: MultiNodeOptimizer, rank: int) -> None:
    first = loss_of(model, INPUTS[rank::4], TARGET[rank::4])
    second = loss_of(model, 2 * INPUTS[rank::4], TARGET[rank::4])
    (first + second).backward(retain_graph=True)
    (first + second).backward()
    for parameter in model.parameters():
        parameter.grad /= 2


@pytest.mark.parametrize("way", [twice, accumulated, once_then_accumulated, with_a_retained_graph])
def test_plain_backward_passes_of_a_step_add_up(way: Way) -> None:
    def train(comm: Communicator) -> list[list[Tensor | None]]:
        model, optimizer = start(comm)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            way(model, optimizer, comm.rank)
            found.append(gradients(model))
        return found

    expected = gradients_alone(lambda model: loss_of(model, INPUTS, TARGET) + loss_of(model, 2 * INPUTS, TARGET))
    for step in zip(*on_ranks(4, train), strict=True):
        assert_same_bits(step)
        assert_close(step[0], expected, within=1e-12)


def test_a_second_exchange_in_a_step_is_called_a_waste_once(capsys: pytest.CaptureFixture[str]) -> None:
    def train(comm: Communicator) -> None:
        model, optimizer = start(comm)
        for _ in range(4):
            optimizer.zero_grad()
            twice(model, optimizer, comm.rank)
            optimizer.step()

    on_ranks(2, train)
    assert capsys.readouterr().err.count("sends all gradients again") == 1


# -- red twins --------------------------------------------------------------------------------------------------------


def test_red_twin_a_new_plan_that_forgets_accumulating_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "take_over", lambda self, other: None)
    with pytest.raises((AssertionError, UsageError)):
        check_accumulates_like_one_process(accumulate_around_zero_grad)


def test_red_twin_only_the_last_weight_of_a_step_counts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    join = Reducer._join

    def forget_before(self: Reducer, backward: object) -> None:
        self._step.weight = None
        join(self, backward)

    monkeypatch.setattr(Reducer, "_join", forget_before)
    with pytest.raises(AssertionError):
        check_accumulates_like_one_process(accumulate_all_but_the_last)
