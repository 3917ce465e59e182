"""What looks at gradients between backward and step sees the mean, on all ranks alike: clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    adamw,
    assert_close,
    assert_same_bits,
    build,
    loss_of,
    mlp,
    on_ranks,
    samples,
    sgd,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3
SHARES = [slice(0, 1), slice(1, 1), slice(1, 12)]
STEPS = 6

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def clip_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_each_norm(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_(parameter, 0.02, foreach=False)


def clip_value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def check_clips_like_one_process(clip: Callable[[nn.Module], None]) -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        for step in range(STEPS):
            inputs, target = (whole[SHARES[comm.rank]] for whole in samples(12, seed=step))
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, inputs, target) if len(target) else None, weight=len(target))
            clip(model)
            optimizer.step()
        return values(model)

    model = build(mlp).double()
    alone = sgd(model.parameters())
    for step in range(STEPS):
        alone.zero_grad()
        loss_of(model, *samples(12, seed=step)).backward()
        clip(model)
        alone.step()
    by_rank = on_ranks(NUM_RANKS, on_rank)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], values(model), within=1e-12)


@pytest.mark.parametrize("clip", [clip_norm, clip_each_norm, clip_value])
def test_clipping_is_that_of_one_process(clip: Callable[[nn.Module], None]) -> None:
    check_clips_like_one_process(clip)


def test_red_twin_clipping_before_the_exchange_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    backward_of = Reducer.backward_of

    def left_to_step(self: Reducer, weight: float) -> Any:
        self.accumulating = True
        return backward_of(self, weight)

    monkeypatch.setattr(Reducer, "backward_of", left_to_step)
    with pytest.raises(AssertionError):
        check_clips_like_one_process(clip_norm)


# -- loss scaling -----------------------------------------------------------------------------------------------------


def fused_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


# Not the fused ones themselves: torch's fused SGD keeps uninitialised momentum when its first step is skipped.
ALONE: dict[Optimizer, Optimizer] = {sgd: sgd, fused_sgd: sgd, fused_adamw: adamw}


def train_scaled(
    optimizer: Any, model: nn.Module, mine: slice, overflows: Callable[[int], bool], *, weighted: bool, unscale: bool
) -> tuple[list[Tensor], list[float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(STEPS):
        inputs, target = (whole[mine] for whole in samples(12, seed=step))
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, inputs, target)) * (float("inf") if overflows(step) else 1.0)
        if weighted:
            optimizer.backward(loss if len(target) else None, weight=len(target))
        else:
            loss.backward()
        if unscale:
            scaler.unscale_(optimizer)
            clip_norm(model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return values(model), scales


def check_scales_like_one_process(optimizer: Optimizer, *, weighted: bool, unscale: bool) -> None:
    """Also where the overflow is on one rank only: in the first step, and in a later one on another rank."""
    shares = SHARES if weighted else [slice(rank, None, NUM_RANKS) for rank in range(NUM_RANKS)]
    culprits = {0: 2, 3: 0}  # by step

    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[float]]:
        model = build(mlp).double()
        wrapped = MultiNodeOptimizer(optimizer(model.parameters()), comm, model=model)

        def overflows(step: int) -> bool:
            return culprits.get(step) == comm.rank

        return train_scaled(wrapped, model, shares[comm.rank], overflows, weighted=weighted, unscale=unscale)

    model = build(mlp).double()
    alone = ALONE[optimizer](model.parameters())
    expected, expected_scales = train_scaled(
        alone, model, slice(None), lambda step: step in culprits, weighted=False, unscale=unscale
    )
    results = on_ranks(NUM_RANKS, on_rank)
    assert_same_bits([found for found, _ in results])
    assert [scales for _, scales in results] == [expected_scales] * NUM_RANKS
    assert expected_scales == [512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]
    assert_close(results[0][0], expected, within=1e-10)


@pytest.mark.parametrize("optimizer", ALONE)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_scales_are_those_of_one_process(
    optimizer: Optimizer, weighted: bool, unscale: bool
) -> None:
    check_scales_like_one_process(optimizer, weighted=weighted, unscale=unscale)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_reach_all_ranks(value: float) -> None:
    def on_rank(comm: Communicator) -> Tensor:
        weight = nn.Parameter(torch.zeros(2))
        MultiNodeOptimizer(sgd([weight]), comm)
        (weight * torch.tensor([1.0, value if comm.rank == 1 else 1.0])).sum().backward()
        return weight.grad

    for gradient in on_ranks(3, on_rank):
        torch.testing.assert_close(gradient, torch.tensor([1.0, value]), equal_nan=True)


def test_red_twin_an_overflow_that_stays_on_its_rank_is_seen() -> None:
    """What happens where gradients aren't exchanged: the null communicator."""

    def on_rank(comm: Communicator) -> list[float]:
        model = build(mlp).double()
        wrapped = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        return train_scaled(
            wrapped, model, slice(None), lambda step: step == comm.rank == 1, weighted=False, unscale=False
        )[1]

    scales = on_ranks(2, on_rank, communicator="null")
    with pytest.raises(AssertionError):
        assert scales[0] == scales[1]
