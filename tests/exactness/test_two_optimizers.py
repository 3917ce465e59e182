"""Several optimizers over one model or over two: each exchanges what is its own, once, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
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
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import DeadlineError, UsageError
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3
SHARES = [slice(0, 3), slice(3, 12), slice(12, 12)]
EQUAL = [slice(0, 4), slice(4, 8), slice(8, 12)]
ALL = slice(None)


def wrap(optimizer: torch.optim.Optimizer, comm: Communicator | None, model: nn.Module) -> Any:
    return optimizer if comm is None else MultiNodeOptimizer(optimizer, comm, model=model)


# -- a GAN ------------------------------------------------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


def adversarial(output: Tensor, label: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


def train_gan(comm: Communicator | None, mine: slice, weighted: bool, scaled: bool = False) -> list[Tensor]:
    """As in torch's own example, but for `zero_grad` of the optimizers."""
    make, judge = build(generator).double(), build(discriminator, seed=1).double()
    make_step, judge_step = wrap(adamw(make.parameters()), comm, make), wrap(sgd(judge.parameters()), comm, judge)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    for step in range(5):
        real, noise = (samples(12, seed=2 * step + half)[0][mine] for half in (0, 1))

        def backward(optimizer: Any, loss: Tensor, overflows: bool, weight: int = len(real)) -> None:
            loss = scaler.scale(loss) * (float("inf") if overflows else 1.0)
            if comm is not None and weighted:
                optimizer.backward(loss if weight else None, weight=weight)
            else:
                loss.backward()

        judge_step.zero_grad()
        fake = make(noise)
        loss = adversarial(judge(real), 1.0) + adversarial(judge(fake.detach()), 0.0)
        backward(judge_step, loss, overflows=scaled and step in (0, 2) and mine.start in (0, None))
        scaler.step(judge_step)
        make_step.zero_grad()
        backward(make_step, adversarial(judge(fake), 1.0), overflows=False)
        scaler.step(make_step)
        scaler.update()
    return values(make) + values(judge)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_gan_trains_like_one_process(weighted: bool, scaled: bool) -> None:
    """With `scaled`, also where the scaler leaves out a step of the discriminator, which then stays armed."""
    shares = SHARES if weighted else EQUAL
    by_rank = on_ranks(NUM_RANKS, lambda comm: train_gan(comm, shares[comm.rank], weighted, scaled))
    assert_same_bits(by_rank)
    assert_close(by_rank[0], train_gan(None, ALL, weighted, scaled), within=1e-10)


def check_generator_leaves_discriminator_alone() -> None:
    def on_rank(comm: Communicator) -> int:
        make, judge = build(generator).double(), build(discriminator).double()
        make_step = MultiNodeOptimizer(sgd(make.parameters()), comm, model=make)
        judge_step = MultiNodeOptimizer(sgd(judge.parameters()), comm, model=judge)
        judge_step.step()
        exchanges = judge_step._reducer._step.num_exchanges
        adversarial(judge(make(samples(4)[0])), 1.0).backward()
        make_step.step()
        return judge_step._reducer._step.num_exchanges - exchanges

    assert on_ranks(2, on_rank) == [0, 0]


def test_the_generators_backward_pass_does_not_exchange_the_discriminator() -> None:
    check_generator_leaves_discriminator_alone()


def test_red_twin_an_optimizer_that_is_never_disarmed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "disarm", lambda self: None)
    with pytest.raises(AssertionError):
        check_generator_leaves_discriminator_alone()


# -- both step from one backward pass ---------------------------------------------------------------------------------


def two_for(model: nn.Module, comm: Communicator | None) -> tuple[Any, Any]:
    """One for the matrices, one for the rest, as with Muon and AdamW."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return wrap(sgd(matrices), comm, model), wrap(adamw(others), comm, model)


def train_both(comm: Communicator | None, mine: slice, weighted: bool, micro_batches: int = 1) -> list[Tensor]:
    model = build(mlp).double()
    first, second = two_for(model, comm)
    for step in range(5):
        inputs, target = (whole[mine] for whole in samples(12, seed=step))
        first.zero_grad()
        second.zero_grad()
        if comm is None or not weighted:
            loss_of(model, inputs, target).backward()
        elif not len(target):
            first.backward(None)
            second.backward(None)
        else:
            pieces = list(zip(inputs.tensor_split(micro_batches), target.tensor_split(micro_batches), strict=True))
            with first.accumulate(), second.accumulate():
                for some, their_target in pieces[:-1]:
                    second.backward(loss_of(model, some, their_target), weight=len(some))
            first.backward(loss_of(model, *pieces[-1]), weight=len(pieces[-1][0]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        first.step()
        second.step()
    return values(model)


def check_both_train_like_one_process(weighted: bool, micro_batches: int = 1) -> None:
    shares = SHARES if weighted else EQUAL
    by_rank = on_ranks(NUM_RANKS, lambda comm: train_both(comm, shares[comm.rank], weighted, micro_batches))
    assert_same_bits(by_rank)
    assert_close(by_rank[0], train_both(None, ALL, weighted), within=1e-10)


@pytest.mark.parametrize("weighted", [True, False])
def test_two_optimizers_step_from_one_backward_pass(weighted: bool) -> None:
    """The weight given to one counts for the other too, and both have their mean when the pass has ended."""
    check_both_train_like_one_process(weighted)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_two_optimizers_accumulate_together(micro_batches: int) -> None:
    check_both_train_like_one_process(True, micro_batches)


def test_a_rank_without_samples_must_tell_both_optimizers() -> None:
    def on_rank(comm: Communicator) -> BaseException | None:
        model = build(mlp).double()
        first, second = two_for(model, comm)
        first.backward(None if comm.rank == 1 else loss_of(model, *samples(4)), weight=4)
        first.step()
        return error_of(second.step) if comm.rank == 1 else None

    with pytest.raises(UsageError, match="backward\\(None\\) of each optimizer"):
        on_ranks(3, on_rank)


def test_red_twin_a_weight_that_reaches_one_optimizer_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.reducer.carried", lambda: None)
    with pytest.raises((AssertionError, UsageError)):
        check_both_train_like_one_process(True)


# -- ranks that reach the parameters of different optimizers ----------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))


Order = Callable[[int], tuple[int, ...]]


def the_first_on_rank_0_only(rank: int) -> tuple[int, ...]:
    return (0, 1) if rank == 0 else (1,)


def the_second_on_rank_0_only(rank: int) -> tuple[int, ...]:
    return (0, 1) if rank == 0 else (0,)


def all_in_turn(rank: int) -> tuple[int, ...]:
    return tuple((rank + other) % NUM_RANKS for other in range(NUM_RANKS))


def check_heads_have_optimizers_of_their_own(order: Order, timeout: float = 5.0) -> None:
    """Each head has its optimizer, and ranks reach them in different orders or not at all."""

    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(Heads).double()
        optimizers = [MultiNodeOptimizer(sgd(head.parameters()), comm) for head in model.heads]
        for step in range(3):
            inputs, target = samples(4, seed=step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss_of(model.heads[head], inputs, target) for head in order(comm.rank)]
            torch.autograd.backward(losses)
            for optimizer in optimizers:
                optimizer.step()
        return values(model)

    model = build(Heads).double()
    alone = sgd(model.parameters())
    for step in range(3):
        alone.zero_grad()
        for rank in range(NUM_RANKS):
            for head in order(rank):
                (loss_of(model.heads[head], *samples(4, seed=step)) / NUM_RANKS).backward()
        alone.step()
    by_rank = on_ranks(NUM_RANKS, on_rank, timeout=timeout)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], values(model), within=1e-12)


@pytest.mark.parametrize("order", [the_first_on_rank_0_only, the_second_on_rank_0_only, all_in_turn])
def test_ranks_may_reach_different_optimizers_in_different_orders(order: Order) -> None:
    check_heads_have_optimizers_of_their_own(order)


def test_ranks_that_reach_one_optimizer_each_wait_for_one_another_until_the_deadline() -> None:
    """Each exchange is complete when the backward pass returns that began it: give such heads one optimizer."""
    with pytest.raises(DeadlineError):
        check_heads_have_optimizers_of_their_own(lambda rank: (rank,), timeout=1.0)


def test_red_twin_waiting_for_one_optimizer_before_sending_the_next_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.reducer.when_it_ends", _at_once_if_it_receives)
    with pytest.raises(DeadlineError):
        check_heads_have_optimizers_of_their_own(all_in_turn, timeout=1.0)


def _at_once_if_it_receives(callback: Any) -> None:
    if getattr(callback, "__name__", "") == "_receive":
        callback()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
