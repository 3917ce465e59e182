"""The oracle: what training in one process on all samples gives, to hold against what ranks give on their shares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from renkei.communicators.communicator import Communicator
from renkei.data.sharding import shard_range
from renkei.gradients.buckets import BucketSizes
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.testing import run_on_ranks

TINY = BucketSizes(first=64, rest=256)  # bytes: several buckets even for the models of these tests
FEATURES = 5
CLASSES = 3

_default_generator = threading.Lock()  # ranks are threads, and torch initialises parameters from one generator


def build(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """The module, initialised from `seed` whatever other ranks do at the same time."""
    with _default_generator, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def samples(num_samples: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and classes, the same on whichever rank they are made."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(CLASSES, (num_samples,), generator=generator)


def even(num_samples: int, num_ranks: int) -> tuple[int, ...]:
    """Shares that differ by one sample at most."""
    return tuple(len(shard_range(num_samples, rank=rank, size=num_ranks)) for rank in range(num_ranks))


def ragged(num_samples: int, num_ranks: int) -> tuple[int, ...]:
    """Shares of 1, 0, and the rest on the last ranks."""
    first = (1, 0)[: num_ranks - 1]
    return first + even(num_samples - sum(first), num_ranks - len(first))


def slice_of(rank: int, sizes: Sequence[int]) -> slice:
    """Which samples a rank has."""
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


@dataclass(frozen=True, kw_only=True)
class Training:
    """A short training, that ranks can do together or one process alone."""

    make: Callable[[], nn.Module] = mlp
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    dtype: torch.dtype = torch.float64
    num_samples: int = 13
    steps: int = 20
    cut: Callable[[int, int], Sequence[int]] = even

    def model(self) -> nn.Module:
        return build(self.make).to(self.dtype)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step."""
        return samples(self.num_samples, seed=1 + step, dtype=self.dtype)

    def alone(self) -> list[Tensor]:
        """The parameters after training on whole batches in one process."""
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        for step in range(self.steps):
            optimizer.zero_grad()
            loss_of(model, *self.batch(step)).backward()
            optimizer.step()
        return values(model)

    def on_rank(self, comm: Communicator) -> list[Tensor]:
        """The parameters after training on this rank's shares, each counted by its samples."""
        model = self.model()
        optimizer = MultiNodeOptimizer(self.optimizer(model.parameters()), comm, model=model)
        mine = slice_of(comm.rank, self.cut(self.num_samples, comm.size))
        for step in range(self.steps):
            inputs, target = (whole[mine] for whole in self.batch(step))
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, inputs, target) if len(target) else None, weight=len(target))
            optimizer.step()
        return values(model)

    def on_ranks(self, num_ranks: int, communicator: str = "flat", **options: Any) -> list[list[Tensor]]:
        return on_ranks(num_ranks, self.on_rank, communicator=communicator, **options)


def start(comm: Communicator, make: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, MultiNodeOptimizer]:
    """A model in 64 bits and plain SGD over ranks, from the same parameters on all of them and in `gradients_alone`."""
    model = build(make).double()
    return model, MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)


def gradients_alone(loss: Callable[[nn.Module], Tensor], make: Callable[[], nn.Module] = mlp) -> list[Tensor | None]:
    """The gradients of a loss of a new model in one process."""
    model = build(make).double()
    loss(model).backward()
    return gradients(model)


def on_ranks(num_ranks: int, fn: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    """`run_on_ranks` with several buckets even for the models of these tests."""
    return run_on_ranks(num_ranks, fn, bucket_sizes=TINY, **options)


def loss_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), target)


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters and buffers as they are now."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients as they are now."""
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], *, within: float) -> None:
    """Each tensor's distance from what is expected is at most `within` times the length of that."""
    assert len(found) == len(expected)
    for at, (mine, right) in enumerate(zip(found, expected, strict=True)):
        assert (mine is None) == (right is None), f"tensor {at} is {mine}, expected {right}"
        if mine is None or right is None:
            continue
        assert mine.shape == right.shape
        assert mine.dtype == right.dtype
        distance = float((mine - right).double().norm() if not mine.is_complex() else (mine - right).norm())
        assert distance <= within * float(right.abs().double().norm()), f"tensor {at} is off by {distance}"


def assert_same_bits(by_rank: Sequence[Sequence[Tensor | None]]) -> None:
    """All ranks have the same numbers, to the last bit."""
    for rank, tensors in enumerate(by_rank):
        for at, (mine, roots) in enumerate(zip(tensors, by_rank[0], strict=True)):
            assert (mine is None) == (roots is None), f"tensor {at} of rank {rank} is {mine}, that of rank 0 {roots}"
            assert mine is None or torch.equal(mine, roots), f"tensor {at} of rank {rank} differs from rank 0's"


def error_of(fn: Callable[[], object]) -> BaseException | None:
    """What `fn` raises; None if nothing."""
    try:
        fn()
    except Exception as error:
        return error.with_traceback(None)
    return None
