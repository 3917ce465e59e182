"""Real processes: the same parameters as torch's DDP gives, compiled or not; its group is the communicator's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import renkei
from exactness.one_process import assert_close, assert_same_bits, build, mlp, samples
from needs import compiler

STEPS = 20
Models = dict[str, list[Tensor]]  # parameters by what trained them


def convnet() -> nn.Module:
    """With batch normalisation, whose statistics each rank keeps for itself."""
    return nn.Sequential(
        nn.Unflatten(1, (5, 1, 1)),
        nn.ConvTranspose2d(5, 6, 4, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def train(
    model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, rank: int
) -> list[Tensor]:
    for step in range(STEPS):
        inputs, target = samples(8, seed=100 * step + rank, dtype=torch.float32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def with_ddp(model: nn.Module, comm: renkei.Communicator) -> list[Tensor]:
    wrapped = DistributedDataParallel(
        model, process_group=comm.group, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    return train(wrapped, list(model.parameters()), sgd(model), comm.rank)


def with_renkei(model: nn.Module, comm: renkei.Communicator, backend: str | None = None) -> list[Tensor]:
    optimizer = renkei.MultiNodeOptimizer(sgd(model), comm, model=model)
    runs = model if backend is None else torch.compile(model, backend=backend)
    return train(runs, list(model.parameters()), optimizer, comm.rank)


def train_each_way(backends: Sequence[str], break_it: Callable[[], None] | None = None) -> Models:
    """On one rank: each model with DDP, with Renkei, and with Renkei compiled."""
    comm = renkei.create_communicator(timeout=30)
    found: Models = {}
    for name, make in {"mlp": mlp, "convnet": convnet}.items():
        model = build(make)
        found[f"{name}, ddp"] = with_ddp(copy.deepcopy(model), comm)
        if break_it is not None:
            break_it()
        found[f"{name}, renkei"] = with_renkei(copy.deepcopy(model), comm)
    for backend in backends:
        found[f"mlp, renkei, {backend}"] = with_renkei(build(mlp), comm, backend)
    comm.close()
    return found


def check_like_ddp(by_rank: Sequence[Models]) -> None:
    for way in by_rank[0]:
        assert_same_bits([found[way] for found in by_rank])
        name = way.split(",")[0]
        assert_close(by_rank[0][way], by_rank[0][f"{name}, ddp"], within=1e-6)


def send_no_gradients() -> None:
    """Send only what rides along, so that no rank notices by itself."""
    from renkei.gradients.exchange import Exchange

    Exchange.launch = lambda self, _: self._works.append(self._carrier.start_sum(self._flat.tail, [self._flat.tail]))


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_parameters_are_those_of_ddp(num_ranks: int) -> None:
    check_like_ddp(renkei.run(train_each_way, num_ranks, []))


def test_parameters_of_traced_models_are_those_of_ddp() -> None:
    check_like_ddp(renkei.run(train_each_way, 2, ["eager", "aot_eager"]))


@compiler
@pytest.mark.timeout(150)  # a compiler of C++ is started, on every rank
def test_parameters_of_compiled_models_are_those_of_ddp() -> None:
    check_like_ddp(renkei.run(train_each_way, 2, ["inductor"]))


def test_red_twin_gradients_not_sent_are_seen() -> None:
    with pytest.raises(AssertionError):
        check_like_ddp(renkei.run(train_each_way, 2, [], send_no_gradients))
