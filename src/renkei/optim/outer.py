"""Outer optimizers for `LocalUpdates`: what is made of the mean of what ranks have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

Outer = Callable[[Iterable[Tensor]], Optimizer]


def outer_average(parameters: Iterable[Tensor]) -> Optimizer:
    """The outer optimizer of local SGD: what ranks share is the mean of what they have."""
    return torch.optim.SGD(parameters, lr=1.0)


def outer_nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> Outer:
    """The outer optimizer of DiLoCo, with its authors' settings (Douillard et al. 2023, section 3)."""
    return lambda parameters: torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, nesterov=True)
