"""How long a training step takes, and how much of it is communication that computing doesn't hide."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from renkei.bench.comparison import ALL_REDUCE, ALONE, Measurement, compare, random_orders
from renkei.bench.timeline import Awaited, Event, record
from renkei.communicators.communicator import Communicator
from renkei.models.convnet import ConvNet, perceptron
from renkei.optim.multi_node import MultiNodeOptimizer

STEPS_IN_A_ROW = 8
DDP_BUCKETS_MIB = (1, 4, 25)
PEERS = ("ddp", "ddp-fp16")

Model = Callable[[], tuple[nn.Module, Tensor, Tensor]]
Job = Callable[[], Awaited | None]  # does one step; tells from when to when gradients were awaited, if it can


def _perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    return perceptron(784, 1000, 1000, 10), torch.rand(100, 784), torch.randint(10, (100,))


def _convnet() -> tuple[nn.Module, Tensor, Tensor]:
    model = ConvNet(1, widths=(32, 64, 128, 256, 256), strides=(2, 1, 2, 1, 1), num_classes=10)
    return model, torch.rand(32, 1, 28, 28), torch.randint(10, (32,))


MODELS: dict[str, Model] = {"perceptron": _perceptron, "convnet": _convnet}


def measure(
    comm: Communicator, model: str, contestants: Mapping[str, Job], rounds: int, timeline: list[Event] | None = None
) -> list[Measurement]:
    """Let all contestants train in turns, in a new random order each round, and compare them.

    Args:
        model: what to call the model.
        contestants: see `contestants_for`; `ALONE` is among them, and peers are those called "ddp".
        rounds: how often each gets its turn of `STEPS_IN_A_ROW` steps.
        timeline: gets what happens in a few more steps of each.
    """
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in contestants}
    for job in contestants.values():
        for _ in range(STEPS_IN_A_ROW):  # the first steps plan buckets
            job()
    for order in random_orders(contestants, rounds):
        for name in order:
            comm.barrier()
            times[name].append([_time(contestants[name]) for _ in range(STEPS_IN_A_ROW)])
    seconds, waiting = {}, {}
    for name, own in times.items():
        took, awaited = torch.tensor(own, dtype=torch.float64).unbind(-1)
        seconds[name] = comm.all_reduce(took, "max").tolist()
        waiting[name] = (comm.all_reduce(awaited, "mean") - comm.all_reduce(awaited, "min")).tolist()
    if timeline is not None:
        timeline += record(comm, {f"{model}: {name}": job for name, job in contestants.items()})
    return compare(model, seconds, waiting, peers=[name for name in contestants if name.split(",")[0] in PEERS])


def _time(job: Job) -> tuple[float, float]:
    """How long a step takes, and for how long of it gradients are awaited; NaN where that can't be told."""
    begin = time.perf_counter()
    awaited = job()
    return time.perf_counter() - begin, math.nan if awaited is None else awaited[1] - awaited[0]


def contestants_for(comm: Communicator, model: Model, peers: Sequence[str]) -> Iterator[tuple[str, Job]]:
    """Who is measured, by name.

    Args:
        model: one of those in `MODELS`.
        peers: of `PEERS`.
    """
    yield ALONE, alone(comm, model)
    yield ALL_REDUCE, _all_reduce(comm, model)
    yield "renkei", with_renkei(comm, model)
    if "ddp-fp16" in peers:
        yield "renkei, fp16", with_renkei(comm, model, wire="fp16")
        for mebibytes in DDP_BUCKETS_MIB:
            yield f"ddp-fp16, {mebibytes} MiB buckets", with_ddp(comm, model, mebibytes, in_fp16=True)
    if "ddp" in peers:
        for mebibytes in DDP_BUCKETS_MIB:
            yield f"ddp, {mebibytes} MiB buckets", with_ddp(comm, model, mebibytes)
        if comm.options.backend == "shared_memory":  # what a user of DDP gains by that backend alone
            group = comm.duplicate().group
            for mebibytes in DDP_BUCKETS_MIB:
                yield f"ddp over shared_memory, {mebibytes} MiB buckets", with_ddp(comm, model, mebibytes, group)


def alone(comm: Communicator, model: Model) -> Job:
    """What a step computes; no rank waits for another."""
    step = _Step(*_model_and_optimizer(comm, model))

    def job() -> None:
        step()

    return job


def _all_reduce(comm: Communicator, model: Model) -> Job:
    """As many bytes as a step exchanges, in one message, while nothing is computed."""
    net, _, _ = _model_and_optimizer(comm, model)
    buffer = torch.zeros(sum(parameter.numel() for parameter in net.parameters()), device=comm.device)

    def job() -> None:
        comm.start_sum(buffer, [buffer]).wait()
        if buffer.is_cuda:
            torch.cuda.synchronize()

    return job


def with_renkei(comm: Communicator, model: Model, **options: Any) -> Job:
    """Renkei's optimizer, with such options."""
    net, data, optimizer = _model_and_optimizer(comm, model)
    return _Step(net, data, MultiNodeOptimizer(optimizer, comm, model=net, **options))


def with_ddp(
    comm: Communicator, model: Model, mebibytes: int, group: dist.ProcessGroup | None = None, *, in_fp16: bool = False
) -> Job:
    """DDP as its documentation advises for speed: gradients as views of buckets, a static graph.

    Args:
        mebibytes: of a bucket.
        group: None for torch's default group.
        in_fp16: whether gradients travel in 16 bits, by torch's own hook.
    """
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
    if in_fp16:
        wrapped.register_comm_hook(group or dist.group.WORLD, fp16_compress_hook)
    return _Step(wrapped, data, optimizer)


def _model_and_optimizer(
    comm: Communicator, model: Model
) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    torch.manual_seed(comm.rank)
    net, inputs, target = model()
    net.to(comm.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    return net, (inputs.to(comm.device), target.to(comm.device)), optimizer


class _Step:
    """A training step, which tells when it awaited gradients: from when this rank had computed all of its own.

    That can't be told on a GPU, which is still computing then.
    """

    def __init__(self, net: nn.Module, data: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._net, self._data, self._optimizer = net, data, optimizer
        self._had_all = 0.0
        for parameter in net.parameters():  # whichever comes last
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        self._had_all = time.perf_counter()

    def __call__(self) -> Awaited | None:
        inputs, target = self._data
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._net(inputs), target).backward()
        awaited = self._had_all, time.perf_counter()
        self._optimizer.step()
        if inputs.is_cuda:
            torch.cuda.synchronize()
        return None if inputs.is_cuda else awaited
