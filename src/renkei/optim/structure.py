"""What an optimizer steps: its parameters, what to call them, and what exchanging their gradients depends on."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters, in the order of their groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """The parameters' names in `model`; of those it doesn't have, where they are."""
    known = {} if model is None else {parameter: name for name, parameter in model.named_parameters()}
    return [
        known.get(parameter, f"parameter {at} of group {number}")
        for number, group in enumerate(optimizer.param_groups)
        for at, parameter in enumerate(group["params"])
    ]


def structure_of(optimizer: Optimizer) -> list[Any]:
    """What exchanges are planned anew for when it changes."""
    parameters = parameters_of(optimizer)
    return [[p.requires_grad for p in parameters], [p.dtype for p in parameters], [p.device for p in parameters]]
