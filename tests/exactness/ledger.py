"""Books of what gradients there were and what was applied, for models whose gradients are known beforehand."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from renkei.communicators.communicator import Communicator
from renkei.gradients.compression.formats import Fp32, WireFormat
from renkei.optim.multi_node import MultiNodeOptimizer

STEPS = 7
SHAPES = [(3,), (9, 8), (), (7, 2, 7), (31,)]


class Weights(nn.Module):
    """Parameters whose gradients are what `slope` is given: the loss is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def slope(self, coefficients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * c).sum() for p, c in zip(self.all, coefficients, strict=True)]).sum()


def coefficients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@dataclass
class Ledger:
    """Trains by SGD with a rate of 1 from zeros, so that the parameters tell what was applied; and keeps the books."""

    comm: Communicator
    wire: WireFormat | str = field(default_factory=Fp32)
    scaler: Any = None
    double_buffering: bool | None = False
    due: list[Tensor] = field(default_factory=lambda: [torch.zeros(shape).double() for shape in SHAPES])

    def __post_init__(self) -> None:
        self.model = Weights()
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = MultiNodeOptimizer(
            inner,
            self.comm,
            model=self.model,
            wire=self.wire,
            grad_scaler=self.scaler,
            double_buffering=self.double_buffering,
        )

    def expect(self, step: int, weights: Sequence[float]) -> None:
        for rank, weight in enumerate(weights):
            for total, each in zip(self.due, coefficients(step, rank), strict=True):
                total += each.double() * (weight / sum(weights))

    def loss(self, step: int) -> Tensor:
        return self.model.slope(coefficients(step, self.comm.rank))

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()
        self.expect(step, [1.0] * self.comm.size)

    def owed(self, at: int) -> Tensor:
        """What this rank owes of a parameter, of a loss that isn't scaled."""
        total = torch.zeros(self.due[at].numel(), dtype=torch.float64)
        saved = self.optimizer.state_dict().get("renkei")
        for feedback in saved["turns"]["feedback"] if saved else ():
            owed = feedback["owed"]["settled"]
            if at in owed:
                total += owed[at].double() / (feedback["loss_scale"] or 1.0)
        return total

    def check(self) -> list[Tensor]:
        """Parameters and owed together are what was due; returns the parameters."""
        self.optimizer.flush()
        for at, (parameter, due) in enumerate(zip(self.model.all, self.due, strict=True)):
            in_all = self.comm.all_reduce(self.owed(at).reshape(due.shape))
            given = in_all - parameter.detach().double()
            assert (given - due).abs().le(2e-5 * (1 + due.abs())).all(), f"of {tuple(due.shape)}: {given - due}"
        return [parameter.detach().clone() for parameter in self.model.all]


def saved_and_loaded(
    comm: Communicator, at: int, change: Callable[[Any], Any] = lambda state: state, **options: Any
) -> list[Tensor]:
    """Train, but from step `at` on with a new model and optimizer that have loaded what the first ones saved.

    Args:
        change: of what is loaded.
        options: see `Ledger`.
    """
    ledger = Ledger(comm, **options)
    for step in range(2 * STEPS):
        if step == at:
            model, state = ledger.model.state_dict(), ledger.optimizer.state_dict()
            file = io.BytesIO()
            torch.save((model, state), file)
            file.seek(0)
            model, state = torch.load(file, weights_only=True)
            due, ledger = ledger.due, Ledger(comm, **options)
            ledger.due = due
            ledger.model.load_state_dict(model)
            ledger.optimizer.load_state_dict(change(state))
        ledger.step(step)
    return [parameter.detach().clone() for parameter in ledger.model.all]
