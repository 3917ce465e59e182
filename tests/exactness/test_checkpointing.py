"""Activation checkpointing, reentrant or not: one exchange, complete when backward returns, from the first step on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exactness.one_process import (
    FEATURES,
    assert_close,
    assert_same_bits,
    build,
    error_of,
    loss_of,
    on_ranks,
    samples,
    sgd,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import GradientError
from renkei.gradients.readiness import Learning
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3
NUM_SAMPLES = 12


class Blocks(nn.Module):
    """Blocks applied in `order`; those whose place is in `kept` without checkpointing."""

    def __init__(self, order: Sequence[int], kept: Sequence[int], reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.order, self.kept, self.reentrant = order, kept, reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.clone().requires_grad_()  # reentrant checkpointing needs it
        for place, number in enumerate(self.order):
            block = self.blocks[number]
            hidden = block(hidden) if place in self.kept else checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden


MODELS = {
    "first and last outside": ((0, 1, 2, 3), (0, 3)),
    "last inside": ((0, 1, 2, 3), (0,)),
    "first inside": ((0, 1, 2, 3), (3,)),
    "all inside": ((0, 1, 2, 3), ()),
    "a block twice": ((0, 1, 1, 3), (0, 3)),
    "a block twice, all inside": ((0, 1, 2, 3, 1), ()),
    "some of them, all inside": ((0, 1, 2, 1), ()),
    "a block twice, once inside": ((0, 1, 1, 3), (0, 1, 3)),
    "a block three times": ((1, 2, 1, 2, 1, 3), (5,)),
}


Backward = Callable[[Any, Tensor, int], None]
EQUAL = [slice(rank, None, NUM_RANKS) for rank in range(NUM_RANKS)]
UNEQUAL = [slice(0, 3), slice(3, 12), slice(12, 12)]


def train(model: Blocks, optimizer: Any, mine: slice, backward: Backward, steps: int) -> list[Tensor]:
    for step in range(steps):
        inputs, target = samples(NUM_SAMPLES, seed=step)
        optimizer.zero_grad()
        if len(target[mine]):
            backward(optimizer, loss_of(model, inputs[mine], target[mine]), len(target[mine]))
        else:
            optimizer.backward(None)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return values(model)


def plain(optimizer: Any, loss: Tensor, weight: int) -> None:
    loss.backward()


def through_the_optimizer(optimizer: Any, loss: Tensor, weight: int) -> None:
    optimizer.backward(loss)


def synchronized(optimizer: Any, loss: Tensor, weight: int) -> None:
    loss.backward()
    optimizer.synchronize()


def weighted(optimizer: Any, loss: Tensor, weight: int) -> None:
    optimizer.backward(loss, weight=weight)


def check_clips_like_one_process(name: str, reentrant: bool, backward: Backward = plain, steps: int = 4) -> None:
    """Clipping only comes out right on gradients that are the mean already."""
    order, kept = MODELS[name]
    shares = UNEQUAL if backward is weighted else EQUAL

    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(lambda: Blocks(order, kept, reentrant)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        return train(model, optimizer, shares[comm.rank], backward, steps)

    by_rank = on_ranks(NUM_RANKS, on_rank)
    assert_same_bits(by_rank)
    model = build(lambda: Blocks(order, range(len(order)), reentrant)).double()
    used = [p for number in set(order) for p in model.blocks[number].parameters()]
    expected = train(model, sgd(used), slice(None), plain, steps)
    assert_close(by_rank[0], expected, within=1e-12)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "some of them, all inside"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_the_mean_when_clipped(name: str, reentrant: bool) -> None:
    check_clips_like_one_process(name, reentrant)


@pytest.mark.parametrize("backward", [through_the_optimizer, weighted, synchronized])
@pytest.mark.parametrize("name", ["last inside", "some of them, all inside"])
def test_gradients_are_the_mean_when_the_optimizer_was_asked_for_them(name: str, backward: Backward) -> None:
    """Where all of a model is inside, and parts of it aren't used, autograd doesn't tell when a pass has ended."""
    check_clips_like_one_process(name, True, backward)


def test_the_first_step_of_a_model_with_a_head_outside_is_one_exchange() -> None:
    """So that a rank whose loss reached none of its parameters can join it from step()."""

    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(lambda: Blocks((0, 1, 2, 3), (3,), reentrant=True)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        for step in range(3):
            optimizer.zero_grad()
            if comm.rank:
                loss_of(model, *samples(4, seed=step)).backward()
            optimizer.step()
        return values(model)

    assert_same_bits(on_ranks(NUM_RANKS, on_rank))


def test_scaled_gradients_that_overflow_on_one_rank_are_skipped_on_all_from_the_first_step_on() -> None:
    def on_rank(comm: Communicator) -> tuple[list[float], list[Tensor]]:
        model = build(lambda: Blocks((0, 1, 2, 1), (), reentrant=True)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, *samples(4, seed=step))
            overflow = float("inf") if step in (0, 2) and comm.rank == 1 else 1.0
            optimizer.backward(scaler.scale(loss) * overflow)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values(model)

    results = on_ranks(NUM_RANKS, on_rank)
    assert [scales for scales, _ in results] == [[4.0, 4.0, 2.0, 2.0]] * NUM_RANKS
    assert_same_bits([found for _, found in results])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_parameter_used_more_often_than_learnt_is_named(reentrant: bool) -> None:
    """Only under reentrant checkpointing: its bucket may have left already."""

    def on_rank(comm: Communicator) -> list[BaseException | None]:
        model = build(lambda: Blocks((0, 1, 2, 3), (0, 3), reentrant)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)

        def step(order: Sequence[int]) -> None:
            model.order = order
            optimizer.zero_grad()
            loss_of(model, *samples(4)).backward()
            optimizer.step()

        return [error_of(lambda order=order: step(order)) for order in ((0, 1, 2, 3), (0, 1, 1, 3), (0, 1, 2, 3))]

    for first, second, third in on_ranks(2, on_rank):
        assert first is None
        assert isinstance(second, GradientError) == reentrant
        assert not reentrant or "blocks.1.0" in str(second)
        assert third is None


def test_a_parameter_used_less_often_than_learnt_is_no_problem() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(lambda: Blocks((0, 1, 1, 2, 3), (0, 4), reentrant=True)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        for step in range(4):
            model.order = (0, 1, 2, 3) if step % 2 else model.order
            optimizer.zero_grad()
            loss_of(model, *samples(12, seed=step)).backward()
            optimizer.step()
        return values(model)

    by_rank = on_ranks(2, on_rank)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], on_ranks(1, on_rank)[0], within=1e-12)


def test_red_twin_learning_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learning, "end_of_backward", lambda self: None)
    with pytest.raises((AssertionError, GradientError)):
        check_clips_like_one_process("a block twice", True)


def check_one_exchange_a_step(name: str, first: int = 0) -> None:
    order, kept = MODELS[name]

    def on_rank(comm: Communicator) -> list[int]:
        model = build(lambda: Blocks(order, kept, reentrant=True)).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        counts = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, *samples(4, seed=step)).backward()
            counts.append(optimizer._reducer._step.num_exchanges)
            optimizer.step()
        return counts

    for counts in on_ranks(2, on_rank):
        assert counts[first:] == [1] * (3 - first)


@pytest.mark.parametrize("name", ["first and last outside", "first inside", "a block twice", "a block three times"])
def test_gradients_are_exchanged_once_in_every_step(name: str) -> None:
    check_one_exchange_a_step(name)


@pytest.mark.parametrize("name", ["last inside", "all inside", "a block twice, all inside"])
def test_gradients_are_exchanged_once_in_every_step_but_the_first(name: str) -> None:
    """In the first, it isn't known yet that the pass around the nested ones has gradients of its own to come."""
    check_one_exchange_a_step(name, first=1)


def test_red_twin_nested_passes_taken_for_outermost_ones_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.backward_pass.is_nested", lambda parameter: False)
    with pytest.raises(AssertionError):
        check_one_exchange_a_step("a block twice")


def test_red_twin_an_exchange_left_to_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "_on_end_of_backward", lambda self, nested: None)
    with pytest.raises(AssertionError):
        check_clips_like_one_process("first inside", True)
