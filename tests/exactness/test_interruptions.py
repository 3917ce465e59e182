"""An exception on one rank, caught there: the others learn of it, and training goes on alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
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
from renkei.errors import GradientError
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer

STEPS = 5


class Accident(Exception):
    pass


class _MayFail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise Accident
        return gradient, None


def loss_that_may_fail(model: nn.Sequential, inputs: Tensor, target: Tensor, *, fails: bool, after: int) -> Tensor:
    """A loss whose backward pass, if it `fails`, does so when the gradients of the layers from `after` on are there."""
    hidden = _MayFail.apply(model[:after](inputs), fails)
    return nn.functional.cross_entropy(model[after:](hidden), target)


Backward = Callable[[MultiNodeOptimizer, Tensor], None]


def plain(optimizer: MultiNodeOptimizer, loss: Tensor) -> None:
    loss.backward()


def weighted(optimizer: MultiNodeOptimizer, loss: Tensor) -> None:
    optimizer.backward(loss, weight=4)


def check_goes_on_alike(
    num_ranks: int, failing: Sequence[int], at_step: int, backward: Backward = plain, after: int = 2
) -> list[list[BaseException | None]]:
    """Training is that of one process without the batch that was lost; returns by rank and step what was caught."""

    def train(comm: Communicator) -> tuple[list[Tensor], list[BaseException | None]]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)

        def step(number: int) -> None:
            inputs, target = samples(4 * num_ranks, seed=number)
            mine = slice(4 * comm.rank, 4 * comm.rank + 4)
            fails = number == at_step and comm.rank in failing
            optimizer.zero_grad()
            backward(optimizer, loss_that_may_fail(model, inputs[mine], target[mine], fails=fails, after=after))
            optimizer.step()

        errors = [error_of(lambda number=number: step(number)) for number in range(STEPS)]
        return values(model), errors

    model = build(mlp).double()
    alone = sgd(model.parameters())
    for number in range(STEPS):
        alone.zero_grad()
        loss_of(model, *samples(4 * num_ranks, seed=number)).backward()
        if number != at_step:
            alone.step()
    results = on_ranks(num_ranks, train)
    assert_same_bits([found for found, _ in results])
    assert_close(results[0][0], values(model), within=1e-12)
    for _, errors in results:
        assert [error is not None for error in errors] == [number == at_step for number in range(STEPS)]
    return [errors for _, errors in results]


@pytest.mark.parametrize("at_step", [0, 1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("backward", [plain, weighted])
def test_the_others_learn_which_rank_failed_and_training_goes_on(
    num_ranks: int, at_step: int, backward: Backward
) -> None:
    culprit = num_ranks - 1
    for rank, errors in enumerate(check_goes_on_alike(num_ranks, [culprit], at_step, backward)):
        error = errors[at_step]
        assert isinstance(error, Accident if rank == culprit else GradientError)
        assert rank == culprit or f"rank {culprit} gave up" in str(error)


@pytest.mark.parametrize("after", [1, 4])
def test_it_does_not_matter_how_far_the_backward_pass_got(after: int) -> None:
    check_goes_on_alike(2, [0], 2, plain, after)


def test_a_weighted_backward_pass_may_fail_before_any_gradient_is_there() -> None:
    check_goes_on_alike(2, [1], 2, weighted, after=5)


def test_several_ranks_may_fail_at_once() -> None:
    errors = check_goes_on_alike(4, [1, 3], 2)
    assert "2 ranks gave up" in str(errors[0][2])


def test_all_ranks_may_fail_at_once() -> None:
    assert all(isinstance(errors[2], Accident) for errors in check_goes_on_alike(3, [0, 1, 2], 2))


# -- hooks of the user's own that raise -------------------------------------------------------------------------------


def raise_accident(*_: object) -> None:
    raise Accident


def add_tensor_hook(model: nn.Module) -> Any:
    return model[2].weight.register_hook(raise_accident)


def add_module_hook(model: nn.Module) -> Any:
    return model[2].register_full_backward_hook(raise_accident)


def add_hook_after_accumulation(model: nn.Module) -> Any:
    return model[2].weight.register_post_accumulate_grad_hook(raise_accident)


@pytest.mark.parametrize("add_hook", [add_tensor_hook, add_module_hook, add_hook_after_accumulation])
def test_a_hook_that_raises_is_named_on_the_others(add_hook: Callable[[nn.Module], Any]) -> None:
    def train(comm: Communicator) -> tuple[list[Tensor], list[BaseException | None]]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, *samples(4)).backward()
            optimizer.step()

        errors = [error_of(step), error_of(step)]
        hook = add_hook(model) if comm.rank == 1 else None
        errors.append(error_of(step))
        if hook is not None:
            hook.remove()
        return values(model), [*errors, error_of(step)]

    results = on_ranks(3, train)
    assert_same_bits([found for found, _ in results])
    for rank, (_, errors) in enumerate(results):
        assert isinstance(errors[2], Accident if rank == 1 else GradientError)
        assert rank == 1 or "rank 1 gave up" in str(errors[2])
        assert [errors[0], errors[1], errors[3]] == [None, None, None]


def test_an_error_that_comes_too_late_to_be_told_is_seen_at_the_next_exchange() -> None:
    """All gradients had been sent and the others have stepped with them: the ranks' parameters differ from now on."""

    def train(comm: Communicator) -> list[BaseException | None]:
        model = build(mlp).double()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)

        def step(fails: bool) -> None:
            optimizer.zero_grad()
            loss_of(model, *samples(4)).backward()
            if fails:
                raise Accident
            optimizer.step()

        return [error_of(lambda at=at: step(fails=at == 2 and comm.rank == 1)) for at in range(4)]

    for rank, errors in enumerate(on_ranks(3, train)):
        assert [errors[0], errors[1]] == [None, None]
        assert isinstance(errors[2], Accident) == (rank == 1)
        assert isinstance(errors[3], GradientError)


# -- red twins --------------------------------------------------------------------------------------------------------


def test_red_twin_a_failure_kept_secret_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "renkei.gradients.exchange.Exchange.give_up", lambda self: (self.send_rest(), self._await_sums())
    )
    with pytest.raises(AssertionError):
        check_goes_on_alike(2, [1], 1)


def test_red_twin_gradients_of_a_failed_step_that_are_used_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.exchange.Exchange._check", lambda self, tally: None)
    with pytest.raises(AssertionError):
        check_goes_on_alike(2, [1], 1)


def test_red_twin_steps_left_out_of_the_count_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "disarm", lambda self: setattr(self, "_is_armed", False))
    with pytest.raises(AssertionError):
        test_an_error_that_comes_too_late_to_be_told_is_seen_at_the_next_exchange()
