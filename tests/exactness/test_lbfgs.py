"""An optimizer that evaluates the loss itself: all ranks must see the same loss and take the same decisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import assert_close, assert_same_bits, build, loss_of, mlp, on_ranks, samples, values
from renkei.communicators.communicator import Communicator
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3
INPUTS, TARGET = samples(13)
SHARES = [slice(0, 4), slice(4, 4), slice(4, 13)]


def lbfgs(model: nn.Module, line_search: str | None) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)


def train(model: nn.Module, optimizer: Any, mine: slice, weighted: bool) -> tuple[list[Tensor], list[float], int]:
    inputs, target = INPUTS[mine], TARGET[mine]
    evaluations = 0

    def closure() -> Tensor | None:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        if weighted and not len(target):
            optimizer.backward(None)
            return None
        loss = loss_of(model, inputs, target)
        if weighted:
            optimizer.backward(loss, weight=len(target))
        else:
            loss.backward()
        return loss

    losses = [float(torch.as_tensor(optimizer.step(closure)).detach()) for _ in range(4)]
    return values(model), losses, evaluations


def check_like_one_process(line_search: str | None, weighted: bool) -> None:
    shares = SHARES if weighted else [slice(None)] * NUM_RANKS

    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[float], int]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(lbfgs(model, line_search), comm, model=model)
        return train(model, optimizer, shares[comm.rank], weighted)

    model = build(mlp).double()
    expected, expected_losses, expected_evaluations = train(model, lbfgs(model, line_search), slice(None), False)
    results = on_ranks(NUM_RANKS, on_rank)
    assert_same_bits([found for found, _, _ in results])
    assert_close(results[0][0], expected, within=1e-6)  # each step divides by differences of gradients
    for _, losses, evaluations in results:
        assert losses == pytest.approx(expected_losses, rel=1e-9)
        assert evaluations == expected_evaluations


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("weighted", [True, False])
def test_lbfgs_searches_like_one_process(line_search: str | None, weighted: bool) -> None:
    check_like_one_process(line_search, weighted)


def test_other_optimizers_take_a_closure_too() -> None:
    def on_rank(comm: Communicator) -> tuple[float, float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((weight + 1) * comm.rank).sum()
            loss.backward()
            return loss

        return float(optimizer.step(closure)), weight.item()

    assert on_ranks(3, on_rank) == [(1.0, -1.0)] * 3


def test_a_closure_may_return_a_number_or_nothing() -> None:
    def on_rank(comm: Communicator) -> tuple[object, object]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm)

        def closure(returned: float | None) -> float | None:
            optimizer.zero_grad()
            weight.sum().backward()
            return returned

        return float(optimizer.step(lambda: closure(float(comm.rank)))), optimizer.step(lambda: closure(None))

    assert on_ranks(2, on_rank) == [(0.5, None)] * 2


def test_red_twin_each_rank_searching_with_its_own_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def its_own(self: MultiNodeOptimizer, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._reducer.complete()
        return 0.0 if loss is None else loss

    monkeypatch.setattr(MultiNodeOptimizer, "_evaluate_alike", its_own)
    with pytest.raises(Exception):  # noqa: B017, PT011 - ranks part, in whichever way
        check_like_one_process("strong_wolfe", weighted=True)
