"""Models of all kinds: dtypes, layouts, shared, frozen, unused and empty parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import (
    Training,
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
    values,
)
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3


class Tied(nn.Module):
    """The same matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


class Images(nn.Module):
    """A convolution whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(5, 4, 1), nn.Conv2d(4, 3, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        images = (inputs[:, :, None, None] * torch.arange(1.0, 10.0).reshape(3, 3)).to(inputs.dtype)
        return self.second(torch.tanh(self.first(images.contiguous(memory_format=torch.channels_last)))).mean((2, 3))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.last = nn.Linear(5, 3)

    def to(self, *args: Any) -> Complex:
        self.last.to(*args)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(inputs) * self.spectrum, n=5).to(self.last.weight.dtype))


class Odd(nn.Module):
    """A scalar, an empty parameter, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs) * self.scale + self.empty.sum()


class Mixed(nn.Module):
    """Layers in four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(5, 5).to(dtype) for dtype in dtypes)
        self.last = nn.Linear(5, 3)

    def to(self, *_: Any) -> Mixed:
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        return self.last(hidden.to(self.last.weight.dtype))


@pytest.mark.parametrize("make", [Tied, Images, Complex, Odd])
@pytest.mark.parametrize("communicator", ["flat", "naive"])
def test_models_train_like_one_process(make: Callable[[], nn.Module], communicator: str) -> None:
    def cut(num_samples: int, num_ranks: int) -> tuple[int, ...]:
        return (2, 10, 0)

    training = Training(make=make, steps=5, cut=cut, num_samples=12)
    by_rank = training.on_ranks(NUM_RANKS, communicator)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], training.alone(), within=1e-12)


def test_a_frozen_model_can_be_stepped() -> None:
    def on_rank(comm: Communicator) -> bool:
        model = build(mlp).requires_grad_(False)
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        before = values(model)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step()
        return all(map(torch.equal, before, values(model)))

    assert on_ranks(2, on_rank) == [True, True]


@pytest.mark.parametrize("communicator", ["flat", "naive"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=["bfloat16", "float16", "mixed"])
def test_gradients_of_16_bits_are_the_mean_as_exactly_as_they_can_be(
    dtype: torch.dtype | None, communicator: str
) -> None:
    """Each rank's share is rounded once, the sum of the ranks once: within two roundings of what 64 bits give."""

    def model_of() -> nn.Module:
        return build(Mixed) if dtype is None else build(mlp).to(dtype)

    def on_rank(comm: Communicator) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        model = model_of()
        optimizer = MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        inputs, target = samples(4, seed=comm.rank, dtype=dtype or torch.float32)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, inputs, target).backward()
            found.append(gradients(model))
        own = model_of()
        loss_of(own, inputs, target).backward()
        return found, gradients(own)

    results = on_ranks(NUM_RANKS, on_rank, communicator=communicator)
    for step in zip(*(found for found, _ in results), strict=True):
        assert_same_bits(step)
        for at, mean in enumerate(step[0]):
            own = torch.stack([gradient[at] for _, gradient in results]).double()
            rounding = torch.finfo(mean.dtype).eps
            allowed = rounding * own.abs().max(0).values + torch.finfo(mean.dtype).tiny
            assert ((mean.double() - own.mean(0)).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_count_samples_exactly(dtype: torch.dtype) -> None:
    """Weights ride in 32 bits, though 257 is no number of bfloat16's and 4099 none of float16's."""

    def on_rank(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        optimizer = MultiNodeOptimizer(sgd([weight]), comm)
        optimizer.backward(weight.sum() if comm.rank else None, weight=(0, 257, 4099 - 257)[comm.rank])
        return float(weight.grad)

    assert on_ranks(3, on_rank) == [1.0] * 3


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def on_rank(comm: Communicator) -> BaseException | None:
        model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3))
        MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
        return error_of(model(torch.arange(4)).sum().backward)

    for error in on_ranks(2, on_rank):
        assert isinstance(error, UsageError)
        assert "0.weight has a sparse gradient" in str(error)
        assert "sparse=False" in str(error)
