"""Training whose computation sleeps, for everybody alike, so that many ranks fit on a machine's few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import renkei
from renkei.communicators.communicator import Communicator

FORWARD = 1 / 3  # of the computation; the rest is the backward pass
BUSY = 0.8  # of a core; a turn in which a rank used more is void

Step = Callable[[], None]


@dataclass
class Model:
    """Of which size, and how long it computes.

    Attributes:
        seconds: forward and backward of all layers; may change between steps.
    """

    layers: int
    numel: int
    seconds: float = 0.01


@dataclass(frozen=True)
class Contestant:
    """A step, and what uses the gradients that are late."""

    step: Step
    flush: Step = lambda: None


class _Asleep(torch.autograd.Function):
    """A layer whose computation takes a fixed time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, model: Model) -> Tensor:
        ctx.model, ctx.shape = model, weight.shape
        time.sleep(model.seconds / model.layers * FORWARD)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.model.seconds / ctx.model.layers * (1 - FORWARD))
        return gradients[0], torch.zeros(ctx.shape), None


class _Emulated(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(model.numel)) for _ in range(model.layers)])
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.layers:
            inputs = _Asleep.apply(inputs, weight, self.model)
        return inputs


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    inputs = torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        net(inputs).sum().backward()
        optimizer.step()

    return step


def with_renkei(comm: Communicator, model: Model, **options: Any) -> Contestant:
    """Renkei's optimizer, with such options."""
    net = _Emulated(model)
    optimizer = renkei.MultiNodeOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), comm, model=net, **options)
    return Contestant(_step(net, optimizer), optimizer.flush)


def with_ddp(comm: Communicator, model: Model, bucket_mb: int, hook: Any = None) -> Contestant:
    """DDP over the communicator's group, with such buckets and maybe a communication hook."""
    net = _Emulated(model)
    ddp = DistributedDataParallel(
        net, process_group=comm.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True
    )
    if hook is not None:
        ddp.register_comm_hook(comm.group, hook)
    return Contestant(_step(ddp, torch.optim.SGD(net.parameters(), lr=0.1)))


def take_turn(comm: Communicator, contestant: Contestant, warm_up: int, steps: int) -> tuple[float, float]:
    """Seconds a step of a training that goes on, and the share of a core that this rank used.

    After steps that aren't timed, so that what is late is on its way when the clock starts, as it is when it stops.
    """
    comm.barrier()
    for _ in range(warm_up):
        contestant.step()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contestant.step()
    took, used = time.perf_counter() - begin, time.process_time() - used
    contestant.flush()
    return took / steps, used / took
