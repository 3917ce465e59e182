"""What wire formats, double buffering and local updates cost in accuracy, on Fashion-MNIST at 1,024 images a step.

    renkei launch -n 4 benchmarks/accuracy.py choose     settings, on samples held out of the training set
    renkei launch -n 4 benchmarks/accuracy.py compare    with those, over seeds; each training reads the test set once

All contestants of a seed have the same initial weights and order of samples.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import renkei
from record import Record, table
from renkei.communicators.communicator import Communicator
from renkei.data.datasets import FASHION_MNIST_FOLDERS, ImageDataset, mnist_like, split
from renkei.models.convnet import ConvNet
from renkei.optim.schedules import cosine, gradual_warmup
from renkei.training.metrics import METRICS

LAUNCHER = "renkei launch -n 4 "
EPOCHS = 10
BATCH = 1024
SEEDS = 8
HELD_OUT = 10_000
STUDENT_95 = {8: 1.895, 12: 1.796, 16: 1.753}  # by number of pairs: one-sided 95 % quantile, one degree of freedom less


@dataclass(frozen=True)
class Contestant:
    """How gradients, or parameters, come together.

    Attributes:
        wire: how they travel.
        is_late: double buffering.
        looks_ahead: as Renkei does there, each rank with its own gradient.
        punctual_epochs: without it in the beginning.
        compensation: of the lateness, see `compensate`.
        ahead: gradients are computed where so many times the last step more would lead, see `look_ahead`.
        halves: half of each batch at parameters that half of the last one told, see `Halves`.
        every: steps of a round of local updates; 0 for none.
        outer_rate, outer_momentum: of their outer optimizer.
        learning_rate: at its peak.
    """

    name: str
    learning_rate: float
    wire: str = "fp32"
    is_late: bool = False
    looks_ahead: bool = False
    punctual_epochs: int = 0
    compensation: float = 0.0
    ahead: float = 0.0
    halves: bool = False
    every: int = 0
    outer_rate: float = 1.0
    outer_momentum: float = 0.0


def convnet() -> nn.Module:
    return ConvNet(1, widths=(16, 32, 64), strides=(2, 2, 2), num_classes=10)


def train(comm: Communicator, how: Contestant, seed: int, training_set: ImageDataset, test_set: ImageDataset) -> float:
    """The share of the test set that is classified correctly after the training."""
    torch.manual_seed(seed)
    model = convnet().to(memory_format=torch.channels_last)
    inner = torch.optim.SGD(
        [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 5e-4},
            {"params": [each for each in model.parameters() if each.dim() <= 1]},
        ],
        lr=how.learning_rate,
        momentum=0.9,
        nesterov=True,
    )
    data = renkei.scatter_dataset(training_set, comm, shuffle=True, seed=seed)
    loader = renkei.DataLoader(data, comm, global_batch_size=BATCH)
    rate = gradual_warmup(cosine(how.learning_rate, EPOCHS), 1.0)
    with Together(comm, model, inner, how) as together:
        step, steps = 0, EPOCHS * math.ceil(len(training_set) / BATCH)
        for epoch in range(EPOCHS):
            together.begin_epoch(epoch)
            for inputs, target in loader:
                for group in inner.param_groups:
                    group["lr"] = rate(EPOCHS * step / steps)
                together.step(inputs, target)
                step += 1
        together.flush()
        renkei.pool_batch_norm(model, comm, len(data))
        return renkei.evaluate(model, test_set, comm, batch_size=1000, metrics=METRICS)["top1"]


class Together:
    """Steps, as a contestant makes them."""

    def __init__(self, comm: Communicator, model: nn.Module, inner: torch.optim.SGD, how: Contestant) -> None:
        self.model, self.how = model, how
        self.brought_together: renkei.LocalUpdates | renkei.MultiNodeOptimizer  # by which of them
        if how.every:
            momentum = how.outer_momentum
            outer = renkei.outer_nesterov(how.outer_rate, momentum) if momentum else renkei.outer_average
            self.brought_together = renkei.LocalUpdates(
                inner, comm, model=model, every=how.every, wire=how.wire, outer=outer, overlap=how.is_late
            )
            self.optimizer: torch.optim.Optimizer = inner
        else:
            self.brought_together = self.optimizer = renkei.MultiNodeOptimizer(
                inner, comm, model=model, wire=how.wire, look_ahead=how.looks_ahead
            )
        self.before = [parameter.detach().clone() for parameter in model.parameters()]
        self.halves = Halves(comm, model, inner) if how.halves else None

    def begin_epoch(self, epoch: int) -> None:
        is_time = self.how.is_late and epoch == self.how.punctual_epochs
        if is_time and isinstance(self.optimizer, renkei.MultiNodeOptimizer):
            self.optimizer.double_buffering = True

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        if self.halves is not None:
            assert isinstance(self.optimizer, renkei.MultiNodeOptimizer)
            self.halves.backward(self.optimizer, inputs, target)
        elif self.how.ahead:
            exact = look_ahead(self.model, self.before, self.how.ahead)
            loss_of(self.model, inputs, target).backward()
            be(self.model, exact)
        else:
            loss_of(self.model, inputs, target).backward()
        if self.how.compensation:
            compensate(self.model, self.before, self.how.compensation)
        self.optimizer.step()

    def flush(self) -> None:
        self.brought_together.flush()

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.brought_together.close()


def loss_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), target)


@torch.no_grad()
def compensate(model: nn.Module, before: list[Tensor], strength: float) -> None:
    """Correct a gradient for having been computed at the parameters before the last step, to first order.

    With the gradient's square for the Hessian's diagonal (Zheng et al. 2017, DC-ASGD, eq. 10).
    """
    for parameter, then in zip(model.parameters(), before, strict=True):
        if parameter.grad is not None:
            parameter.grad.addcmul_(parameter.grad.square(), parameter - then, value=strength)
        then.copy_(parameter)


@torch.no_grad()
def look_ahead(model: nn.Module, before: list[Tensor], steps: float) -> list[Tensor]:
    """Go on from the parameters as the last step went; returns where they were.

    What is computed there is used a step later, when they will be about there (linear weight prediction, Kosson et al.
    2021, Pipelined backpropagation at scale, section 3.2, with the last step for the velocity).
    """
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, now, then in zip(model.parameters(), exact, before, strict=True):
        parameter.add_(now - then, alpha=steps)
        then.copy_(now)
    return exact


@torch.no_grad()
def be(model: nn.Module, values: Sequence[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


class Halves:
    """Half-batch correction as in ACCO (Nabli et al. 2024): what is late is only an estimate.

    The first half's gradient is computed at parameters estimated from the first half of the batch before, while the
    rest of that travels; the second half's at the exact ones. Both are used once. Nothing overlaps here, where only
    accuracy counts.
    """

    def __init__(self, comm: Communicator, model: nn.Module, inner: torch.optim.SGD) -> None:
        self.comm, self.model, self.inner = comm, model, inner
        self.estimate: list[Tensor] | None = None

    def backward(self, optimizer: renkei.MultiNodeOptimizer, inputs: Tensor, target: Tensor) -> None:
        half = len(target) // 2
        parameters = list(self.model.parameters())
        exact = [parameter.detach().clone() for parameter in parameters]
        be(self.model, self.estimate or exact)
        with optimizer.accumulate():
            (loss_of(self.model, inputs[:half], target[:half]) / 2).backward()
        first = torch.cat([2 * parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        mean = self.comm.all_reduce(first, "mean").split([parameter.numel() for parameter in parameters])
        be(self.model, exact)
        (loss_of(self.model, inputs[half:], target[half:]) / 2).backward()
        self.estimate = [self._stepped(at, gradient) for at, gradient in zip(parameters, mean, strict=True)]

    @torch.no_grad()
    def _stepped(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Where a step of Nesterov's with that gradient leads to."""
        group = next(group for group in self.inner.param_groups if any(each is parameter for each in group["params"]))
        gradient = gradient.view_as(parameter) + group["weight_decay"] * parameter
        momentum = self.inner.state[parameter].get("momentum_buffer")
        momentum = gradient if momentum is None else group["momentum"] * momentum + gradient
        return parameter - group["lr"] * (gradient + group["momentum"] * momentum)


# -- choosing ---------------------------------------------------------------------------------------------------------

RATES = (0.2, 0.4, 0.8, 1.6)
COMPENSATIONS = (0.04, 1.0)
AHEAD = (1.0, 2.0)
ROUNDS = {(13, "int8"): ((1.0, 0.0), (0.7, 0.5), (1.0, 0.5), (0.7, 0.9)), (50, "fp32"): ((1.0, 0.0), (0.7, 0.9))}


def candidates(rate: float) -> Iterator[Contestant]:
    """Everything but the learning rate that is to be chosen."""
    for strength in COMPENSATIONS:
        yield Contestant(f"late, compensated {strength}", rate, "bf16", True, compensation=strength)
    yield Contestant("late", rate, "bf16", True)
    yield Contestant("late, looks ahead with own gradients", rate, "bf16", True, True)
    for steps in AHEAD:
        yield Contestant(f"late, looks {steps} steps ahead along the last", rate, "bf16", True, ahead=steps)
    yield Contestant("late after an epoch", rate, "bf16", True, punctual_epochs=1)
    yield Contestant("halves", rate, "bf16", halves=True)
    for (every, wire), outers in ROUNDS.items():  # 52 and 50 times less traffic than fp32 gradients in each step
        for outer_rate, momentum in outers:
            name = f"local, every {every}, {wire}, outer {outer_rate} {momentum}"
            yield Contestant(name, rate, wire, every=every, outer_rate=outer_rate, outer_momentum=momentum)


def choose(comm: Communicator, record: Record | None, training_set: ImageDataset) -> None:
    kept, held_out = split(training_set, HELD_OUT, seed=1)
    found: dict[Contestant, list[float]] = {}

    def take(how: Contestant, seeds: int) -> None:
        for seed in range(100, 100 + seeds):
            found.setdefault(how, []).append(measured(comm, record, how, seed, kept, held_out))

    for rate in RATES:
        take(Contestant("punctual, fp32", rate), 1)
    best = max(found, key=lambda how: statistics.fmean(found[how])).learning_rate
    for how in candidates(best):
        take(how, 1)
    rows = [(how.name, how.learning_rate, f"{100 * statistics.fmean(own):.2f}", len(own)) for how, own in found.items()]
    if record is not None:
        heads = ("contestant", "rate", "top-1, %", "seeds")
        text = f"{HELD_OUT:,} samples held out of the training set; the learning rate is chosen for fp32, punctual.\n\n"
        print(record.write("Choosing settings", text + table(heads, rows), launcher=LAUNCHER))


# -- comparing --------------------------------------------------------------------------------------------------------


def contestants() -> list[Contestant]:
    """With what was chosen."""
    rate, local = 0.8, "local updates, every 13 steps, int8"
    return [
        Contestant("punctual, fp32", rate),
        Contestant("double buffering, bf16", rate, "bf16", True, True),
        Contestant("double buffering, bf16, without looking ahead", rate, "bf16", True),
        Contestant("int8, error feedback", rate, "int8"),
        Contestant("PowerSGD, rank 4", rate, "power_sgd"),
        Contestant(local, rate, "int8", every=13, outer_rate=1.0, outer_momentum=0.5),
    ]


def compare(comm: Communicator, record: Record | None, training_set: ImageDataset, test_set: ImageDataset) -> None:
    found: dict[str, list[float]] = {how.name: [] for how in contestants()}
    for seed in range(SEEDS):
        for how in contestants():
            found[how.name].append(measured(comm, record, how, seed, training_set, test_set))
    if record is not None:
        print(record.write("Accuracy over slow networks", describe(comm.size, found), launcher=LAUNCHER))


def measured(
    comm: Communicator, record: Record | None, how: Contestant, seed: int, train_on: ImageDataset, test_on: ImageDataset
) -> float:
    began = time.perf_counter()
    top1 = train(comm, how, seed, train_on, test_on)
    if record is not None:
        record.add(**asdict(how), seed=seed, top1=top1, seconds=round(time.perf_counter() - began, 1))
    return top1


def describe(num_ranks: int, found: dict[str, list[float]]) -> str:
    heads = ("contestant", "top-1, % (lowest to highest)", "loss against the first, points", "95 % upper bound")
    first, *_ = found.values()
    rows = []
    for name, own in found.items():
        loss = [100 * (a - b) for a, b in zip(first, own, strict=True)]
        mean, error = statistics.fmean(loss), statistics.stdev(loss) / math.sqrt(len(loss))
        spread = f"{100 * statistics.fmean(own):.2f} ({100 * min(own):.2f} to {100 * max(own):.2f})"
        bound = f"{mean + STUDENT_95[len(loss)] * error:+.2f}"
        rows.append((name, spread, f"{mean:+.2f} ± {error:.2f}", bound) if own is not first else (name, spread, "", ""))
    return (
        f"Fashion-MNIST, {BATCH:,} images a step over {num_ranks} ranks, {EPOCHS} epochs, a convolutional network of "
        f"{sum(parameter.numel() for parameter in convnet().parameters()):,} parameters, SGD with Nesterov's momentum, "
        "one epoch of warm-up and a cosine; batch normalization over each rank's share. Each seed has the same initial "
        f"weights and order of samples for all; {len(first)} seeds. Settings were chosen on samples held out of the "
        "training set (`records/*_accuracy-choose`). The bound is of the mean loss, one-sided, by Student's t over "
        "pairs.\n\n" + table(heads, rows)
    )


def main() -> None:
    torch.set_num_threads(1)
    what = sys.argv[1] if len(sys.argv) > 1 else "compare"
    training_set, test_set = mnist_like(FASHION_MNIST_FOLDERS)
    with renkei.create_communicator() as comm:
        record = Record(f"accuracy-{what}") if comm.rank == 0 else None
        if what == "choose":
            choose(comm, record, training_set)
        else:
            compare(comm, record, training_set, test_set)


if __name__ == "__main__":
    main()
