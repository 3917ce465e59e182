"""N ranks give the parameters of one process on all samples; and what is checked here is seen when it is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    Training,
    adamw,
    assert_close,
    assert_same_bits,
    build,
    even,
    loss_of,
    mlp,
    ragged,
    sgd,
    slice_of,
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.gradients.ballot import Tally
from renkei.gradients.exchange import Exchange
from renkei.gradients.flat import FlatGradients
from renkei.gradients.reducer import Reducer
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.testing import run_on_ranks

Cut = Callable[[int, int], tuple[int, ...]]
PRECISION = {torch.float32: 1e-5, torch.float64: 1e-12}


def check_same_as_one_process(training: Training, num_ranks: int, communicator: str = "flat") -> None:
    by_rank = training.on_ranks(num_ranks, communicator)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], training.alone(), within=PRECISION[training.dtype])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [even, ragged])
def test_weighted_ranks_train_like_one_process(num_ranks: int, cut: Cut) -> None:
    check_same_as_one_process(Training(cut=cut), num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_send_tensor_by_tensor_train_like_one_process(num_ranks: int) -> None:
    check_same_as_one_process(Training(cut=ragged), num_ranks, "naive")


@pytest.mark.parametrize("communicator", ["flat", "naive"])
def test_in_32_bits_ranks_train_like_one_process(communicator: str) -> None:
    check_same_as_one_process(Training(cut=ragged, dtype=torch.float32), 3, communicator)


@pytest.mark.parametrize("num_samples", [1, 2, 359])
def test_ranks_train_like_one_process_on_any_number_of_samples(num_samples: int) -> None:
    check_same_as_one_process(Training(num_samples=num_samples), 3)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_adamw_train_like_one_process(num_ranks: int) -> None:
    check_same_as_one_process(Training(optimizer=adamw, cut=ragged), num_ranks)


def test_adamw_in_32_bits_trains_like_one_process() -> None:
    """Its first steps divide gradients by their own size, so that those near zero keep no digit: a wider bound."""
    training = Training(optimizer=adamw, dtype=torch.float32, cut=ragged)
    by_rank = training.on_ranks(4)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], training.alone(), within=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_plain_backward_on_equal_shares_trains_like_one_process(num_ranks: int) -> None:
    training = Training(num_samples=12)

    def train(comm: Communicator) -> list[Tensor]:
        model = training.model()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        mine = slice_of(comm.rank, even(12, comm.size))
        for step in range(training.steps):
            inputs, target = training.batch(step)
            optimizer.zero_grad()
            loss_of(model, inputs[mine], target[mine]).backward()
            optimizer.step()
        return values(model)

    by_rank = run_on_ranks(num_ranks, train)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], training.alone(), within=1e-12)


def test_the_null_communicator_lets_each_rank_train_alone() -> None:
    """Each from rank 0's parameters, on its own samples, counted as if they were all there are."""
    training = Training(cut=even, steps=5)
    by_rank = training.on_ranks(3, "null")
    for rank, found in enumerate(by_rank):
        model = training.model()
        optimizer = sgd(model.parameters())
        for step in range(training.steps):
            inputs, target = training.batch(step)
            mine = slice_of(rank, even(13, 3))
            optimizer.zero_grad()
            loss_of(model, inputs[mine], target[mine]).backward()
            optimizer.step()
        assert_close(found, values(model), within=1e-12)


def test_a_model_of_many_small_buckets_trains_like_one_process() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), *[nn.Sequential(nn.Tanh(), nn.Linear(6, 6)) for _ in range(12)])

    check_same_as_one_process(Training(make=deep, steps=10, cut=ragged), 4)


def test_gradients_are_the_mean_when_backward_returns_and_not_before() -> None:
    """The rank writes its number: a closed form, for one step."""

    def step(comm: Communicator) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        optimizer.zero_grad()
        (weight * comm.rank).sum().backward()
        return weight.grad.tolist() if weight.grad is not None else []

    for size in (1, 2, 3, 4):
        assert run_on_ranks(size, step) == [[(size - 1) / 2]] * size


# -- red twins --------------------------------------------------------------------------------------------------------

SHORT = Training(steps=3, cut=ragged)


def without_first_bucket(patch: pytest.MonkeyPatch) -> None:
    launch = Exchange.launch

    class Nothing:
        def wait(self) -> None: ...

    def leave_out_the_first(self: Exchange, bucket: int) -> None:
        if bucket:
            launch(self, bucket)
        else:
            self._works.append(Nothing())

    patch.setattr(Exchange, "launch", leave_out_the_first)


def without_scale(patch: pytest.MonkeyPatch) -> None:
    pack, one = FlatGradients.pack, torch.tensor(1.0, dtype=torch.float64)
    patch.setattr(FlatGradients, "pack", lambda self, at, scale: pack(self, at, one))


def without_final_division(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlatGradients, "scale", lambda self, factor: None)


def without_weights(patch: pytest.MonkeyPatch) -> None:
    backward = MultiNodeOptimizer.backward
    patch.setattr(
        MultiNodeOptimizer,
        "backward",
        lambda self, loss, weight=None: backward(self, loss, None if loss is None else 1),
    )


def one_weight_off(patch: pytest.MonkeyPatch) -> None:
    backward_of = Reducer.backward_of
    patch.setattr(Reducer, "backward_of", lambda self, weight: backward_of(self, weight + (self._carrier.rank == 1)))


def packed_one_element_off(patch: pytest.MonkeyPatch) -> None:
    pack = FlatGradients.pack

    def one_off(self: FlatGradients, at: int, scale: Tensor) -> None:
        pack(self, at, scale)
        if at == 2:
            self._places[at].copy_(self._places[at].flatten().roll(1).reshape(self._places[at].shape))

    patch.setattr(FlatGradients, "pack", one_off)


def added_twice(patch: pytest.MonkeyPatch) -> None:
    launch = Exchange.launch

    def twice(self: Exchange, bucket: int) -> None:
        launch(self, bucket)
        if not bucket:
            self._works.pop().wait()
            launch(self, bucket)

    patch.setattr(Exchange, "launch", twice)


def without_users(patch: pytest.MonkeyPatch) -> None:
    """A rank that has no gradient of its own doesn't learn that others have one."""
    decode = Tally.decode
    patch.setattr(Tally, "decode", lambda *args: dataclasses.replace(decode(*args), counts=[0] * 100))


def leftovers_not_cleared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlatGradients, "clear", lambda self, at: None)


DEFECTS = [
    without_first_bucket,
    without_scale,
    without_final_division,
    without_weights,
    one_weight_off,
    packed_one_element_off,
    added_twice,
    without_users,
    leftovers_not_cleared,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_red_twin_of_training_like_one_process(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_as_one_process(SHORT, 4)
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        check_same_as_one_process(SHORT, 4)


def test_red_twin_a_sample_left_out_is_seen() -> None:
    def forgetful(num_samples: int, num_ranks: int) -> tuple[int, ...]:
        return even(num_samples - 1, num_ranks)

    with pytest.raises(AssertionError):
        check_same_as_one_process(dataclasses.replace(SHORT, cut=forgetful), 3)


def test_models_are_built_alike_on_thread_ranks() -> None:
    """The oracle needs it."""
    assert_same_bits(run_on_ranks(4, lambda comm: values(build(mlp, seed=3))))
