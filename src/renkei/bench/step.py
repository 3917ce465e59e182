"""How long a training step takes, and how much of it is communication that computing doesn't hide."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from renkei.bench.comparison import ALL_REDUCE, ALONE, Measurement, compare, random_orders
from renkei.communicators.communicator import Communicator
from renkei.models.convnet import ConvNet, perceptron
from renkei.optim.multi_node import MultiNodeOptimizer

STEPS_IN_A_ROW = 8
DDP_BUCKETS_MIB = (1, 4, 25)

Step = Callable[[], None]
Model = Callable[[], tuple[nn.Module, Tensor, Tensor]]


def _perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    return perceptron(784, 1000, 1000, 10), torch.rand(100, 784), torch.randint(10, (100,))


def _convnet() -> tuple[nn.Module, Tensor, Tensor]:
    model = ConvNet(1, widths=(32, 64, 128, 256, 256), strides=(2, 1, 2, 1, 1), num_classes=10)
    return model, torch.rand(32, 1, 28, 28), torch.randint(10, (32,))


MODELS: dict[str, Model] = {"perceptron": _perceptron, "convnet": _convnet}


def measure(comm: Communicator, model: str, peers: Sequence[str], rounds: int) -> list[Measurement]:
    """Let all contestants train in turns, in a new random order each round, and compare them.

    Args:
        model: one of `MODELS`.
        peers: of "ddp".
        rounds: how often each gets its turn of `STEPS_IN_A_ROW` steps.
    """
    contestants = dict(_contestants(comm, MODELS[model], peers))
    seconds: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for step in contestants.values():
        for _ in range(STEPS_IN_A_ROW):  # the first steps plan buckets
            step()
    for order in random_orders(contestants, rounds):
        for name in order:
            comm.barrier()
            seconds[name].append([_time(contestants[name]) for _ in range(STEPS_IN_A_ROW)])
    slowest = {name: comm.all_reduce(torch.tensor(own), "max").tolist() for name, own in seconds.items()}
    return compare(model, slowest, peers=[name for name in contestants if name.split(",")[0] in peers])


def _time(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _contestants(comm: Communicator, model: Model, peers: Sequence[str]) -> Iterator[tuple[str, Step]]:
    yield ALONE, _step(*_model_and_optimizer(comm, model))
    yield ALL_REDUCE, _all_reduce(comm, model)
    yield "renkei", _renkei(comm, model)
    if "ddp" in peers:
        for mebibytes in DDP_BUCKETS_MIB:
            yield f"ddp, {mebibytes} MiB buckets", _ddp(comm, model, mebibytes, None)
        if comm.options.backend == "shared_memory":  # what a user of DDP gains by that backend alone
            group = comm.duplicate().group
            for mebibytes in DDP_BUCKETS_MIB:
                yield f"ddp over shared_memory, {mebibytes} MiB buckets", _ddp(comm, model, mebibytes, group)


def _all_reduce(comm: Communicator, model: Model) -> Step:
    """As many bytes as a step exchanges, in one message, while nothing is computed."""
    net, _, _ = _model_and_optimizer(comm, model)
    buffer = torch.zeros(sum(parameter.numel() for parameter in net.parameters()), device=comm.device)

    def step() -> None:
        comm.start_sum(buffer, [buffer]).wait()
        if buffer.is_cuda:
            torch.cuda.synchronize()

    return step


def _renkei(comm: Communicator, model: Model) -> Step:
    net, data, optimizer = _model_and_optimizer(comm, model)
    return _step(net, data, MultiNodeOptimizer(optimizer, comm, model=net))


def _ddp(comm: Communicator, model: Model, mebibytes: int, group: dist.ProcessGroup | None) -> Step:
    """DDP as its documentation advises for speed: gradients as views of buckets, a static graph."""
    net, data, optimizer = _model_and_optimizer(comm, model)
    with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers; 2.11 has no other name for it
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            net,
            process_group=group,
            device_ids=[comm.device] if comm.device.type == "cuda" else None,
            bucket_cap_mb=mebibytes,
            gradient_as_bucket_view=True,
            static_graph=True,
            broadcast_buffers=False,
        )
    return _step(wrapped, data, optimizer)


def _model_and_optimizer(
    comm: Communicator, model: Model
) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    torch.manual_seed(comm.rank)
    net, inputs, target = model()
    net.to(comm.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    return net, (inputs.to(comm.device), target.to(comm.device)), optimizer


def _step(net: nn.Module, data: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> Step:
    inputs, target = data

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        optimizer.step()
        if inputs.is_cuda:
            torch.cuda.synchronize()

    return step
