"""Ranks that use different parameters, or none, give what one process does with the mean of their losses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    start,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.data.sharding import Share
from renkei.errors import UnevenBatchError
from renkei.gradients.ballot import Tally
from renkei.optim.multi_node import MultiNodeOptimizer

INPUTS, TARGET = samples(6)
NUM_RANKS = 3
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Branches(nn.Module):
    """A stem, applied any number of times, and heads, any of which may be used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

    def loss(self, path: Path) -> Tensor | None:
        hidden = INPUTS
        for _ in range(path.depth):
            hidden = torch.tanh(self.stem(hidden))
        losses = [loss_of(head, hidden, TARGET) for at, head in enumerate(self.heads) if at in path.heads]
        return sum(losses) if losses else None


@dataclasses.dataclass(frozen=True)
class Path:
    """How a rank goes through the model in a step."""

    heads: tuple[int, ...] = ()
    depth: int = 1


Plan = Sequence[Sequence[Path]]  # by step, by rank


def train_on_ranks(plan: Plan, optimizer: Optimizer, set_to_none: bool = True) -> list[Any]:
    def train(comm: Communicator) -> tuple[list[Tensor], int]:
        model = build(Branches).double()
        wrapped = MultiNodeOptimizer(optimizer(model.parameters()), comm, model=model)
        for paths in plan:
            wrapped.zero_grad(set_to_none)
            loss = model.loss(paths[comm.rank])
            if loss is not None:
                loss.backward()
            wrapped.step()
        return values(model), len(wrapped.state)

    return on_ranks(NUM_RANKS, train)


def train_alone(plan: Plan, optimizer: Optimizer, set_to_none: bool = True) -> tuple[list[Tensor], int]:
    model = build(Branches).double()
    alone = optimizer(model.parameters())
    for paths in plan:
        alone.zero_grad(set_to_none)
        losses = [loss for path in paths if (loss := model.loss(path)) is not None]
        if losses:
            (sum(losses) / NUM_RANKS).backward()
        alone.step()
    return values(model), len(alone.state)


def check_same_as_mean_of_losses(plan: Plan, optimizer: Optimizer = sgd, set_to_none: bool = True) -> None:
    expected, num_states = train_alone(plan, optimizer, set_to_none)
    results = train_on_ranks(plan, optimizer, set_to_none)
    assert_same_bits([found for found, _ in results])
    assert_close(results[0][0], expected, within=1e-12)
    assert [number for _, number in results] == [num_states] * NUM_RANKS


def always(*paths: Path, steps: int = 4) -> Plan:
    return [paths] * steps


EACH_ITS_HEAD = always(Path((0,)), Path((1,)), Path((2,)))
TAKING_TURNS = [[Path(((rank + step) % 4,)) for rank in range(NUM_RANKS)] for step in range(6)]
PAUSING = [[Path((0, step % 2)) for _ in range(NUM_RANKS)] for step in range(5)]
ONE_JOINS_ONLY = always(Path((0, 1)), Path(), Path((2, 3)))
NOBODY_NOW_AND_THEN = [[Path((0, 1)) if step % 2 else Path()] * NUM_RANKS for step in range(4)]
DIFFERENT_DEPTHS = [[Path((0, 3), (rank + step) % 3) for rank in range(NUM_RANKS)] for step in range(4)]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "plan",
    [EACH_ITS_HEAD, TAKING_TURNS, PAUSING, ONE_JOINS_ONLY, NOBODY_NOW_AND_THEN, DIFFERENT_DEPTHS],
    ids=["each its head", "taking turns", "pausing", "one joins only", "nobody now and then", "different depths"],
)
def test_ranks_may_use_different_parameters(plan: Plan, set_to_none: bool, optimizer: Optimizer) -> None:
    check_same_as_mean_of_losses(plan, optimizer, set_to_none)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_may_use_any_parameters_at_any_step(seed: int) -> None:
    chance = random.Random(seed)
    heads = [tuple(sorted(chance.sample(range(4), chance.randint(0, 4)))) for _ in range(8 * NUM_RANKS)]
    plan = [[Path(heads[step * NUM_RANKS + rank], chance.randint(0, 2)) for rank in range(3)] for step in range(8)]
    check_same_as_mean_of_losses(plan)


def test_a_parameter_no_rank_used_has_no_gradient_and_is_left_alone() -> None:
    """Neither weight decay nor momentum touches it, as in one process."""

    def train(comm: Communicator) -> tuple[bool, bool, int]:
        model = build(Branches).double()
        before = values(model.heads[3])
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(Path((comm.rank,))).backward()
            optimizer.step()
        unchanged = all(map(torch.equal, before, values(model.heads[3])))
        return model.heads[3].weight.grad is None, unchanged, len(optimizer.state)

    assert on_ranks(NUM_RANKS, train) == [(True, True, 8)] * NUM_RANKS


@pytest.mark.parametrize("silent", [[1], [0, 2], [0, 1, 2]])
def test_ranks_without_samples_count_nothing(silent: list[int]) -> None:
    """The mean is over the ranks that have some; with none anywhere, no parameter changes."""

    def train(comm: Communicator) -> list[Tensor]:
        model, optimizer = start(comm)
        for _ in range(3):
            optimizer.zero_grad()
            if comm.rank in silent:
                optimizer.backward(None)
            else:
                optimizer.backward(loss_of(model, INPUTS, TARGET), weight=2.5)
            optimizer.step()
        return values(model)

    model = build(mlp).double()
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3 if len(silent) < NUM_RANKS else 0):
        alone.zero_grad()
        loss_of(model, INPUTS, TARGET).backward()
        alone.step()
    by_rank = on_ranks(NUM_RANKS, train)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], values(model), within=1e-12)


def test_a_rank_without_samples_among_equal_ones_is_left_out_of_the_mean() -> None:
    def train(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        optimizer.backward((weight * (comm.rank + 1)).sum() if comm.rank else None)
        return float(weight.grad)

    assert on_ranks(3, train) == [2.5] * 3


def test_a_rank_that_only_joins_has_the_mean_after_synchronize() -> None:
    def train(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        if comm.rank:
            (weight * comm.rank).sum().backward()
        optimizer.synchronize()
        return float(weight.grad)

    assert on_ranks(4, train) == [1.5] * 4


# -- uneven shares the loader knows of --------------------------------------------------------------------------------

UNEVEN = Share((3, 3, 0), uneven=(0, 3))


@pytest.mark.parametrize("last_rank", ["plain", "joins"])
def test_a_plain_backward_pass_of_an_uneven_batch_is_refused_on_all_ranks(last_rank: str) -> None:
    def train(comm: Communicator) -> tuple[BaseException | None, bool]:
        model, optimizer = start(comm)
        before = values(model)
        comm.shares["a loader"] = UNEVEN

        def step() -> None:
            optimizer.zero_grad()
            if comm.rank < 2 or last_rank == "plain":
                loss_of(model, INPUTS, TARGET).backward()
            optimizer.step()

        return error_of(step), all(map(torch.equal, before, values(model)))

    for error, unchanged in on_ranks(3, train):
        assert isinstance(error, UnevenBatchError)
        assert "ranks get 0 or 3 samples" in str(error)
        assert "optimizer.backward(loss, weight=len(x))" in str(error)
        assert unchanged


def test_training_can_go_on_with_weights_after_an_uneven_batch_was_refused() -> None:
    def train(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        comm.shares["a loader"] = Share((1, 2, 1), uneven=(1, 2))
        with pytest.raises(UnevenBatchError):
            (weight * comm.rank).sum().backward()
        optimizer.zero_grad()
        optimizer.backward((weight * comm.rank).sum(), weight=comm.shares["a loader"].sizes[comm.rank])
        return float(weight.grad)

    assert on_ranks(3, train) == [1.0] * 3


def test_a_last_batch_that_will_be_uneven_is_refused_at_the_first() -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, _ = start(comm)
        comm.shares["a loader"] = Share((2, 2), uneven=(1, 2))
        return error_of(loss_of(model, INPUTS, TARGET).backward)

    assert all(isinstance(error, UnevenBatchError) for error in on_ranks(2, train))


def test_an_even_share_needs_no_weights() -> None:
    def train(comm: Communicator) -> BaseException | None:
        model, _ = start(comm)
        comm.shares["a loader"] = Share((3, 3), uneven=None)
        return error_of(loss_of(model, INPUTS, TARGET).backward)

    assert on_ranks(2, train) == [None, None]


# -- red twins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [0, 1])
def test_red_twin_users_counted_as_none_or_all_are_seen(ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Tally.decode
    monkeypatch.setattr(Tally, "decode", lambda *args: dataclasses.replace(decode(*args), counts=[ignored] * 100))
    with pytest.raises(AssertionError):
        check_same_as_mean_of_losses(EACH_ITS_HEAD)


def test_red_twin_what_is_left_in_the_buffer_for_an_unused_parameter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.flat.FlatGradients.clear", lambda self, at: None)
    with pytest.raises(AssertionError):
        check_same_as_mean_of_losses(TAKING_TURNS)


def test_red_twin_an_unchecked_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.optim.multi_node.check_equal_batches", lambda shares: None)
    with pytest.raises(AssertionError):
        test_a_last_batch_that_will_be_uneven_is_refused_at_the_first()
