"""A remedy for late gradients: each rank computes its gradients where its own last ones would lead.

With double buffering, what is computed at the parameters of step k is used at those of step k+1. A rank knows its own
part of the step between the two long before the mean of all ranks comes. So it makes that step with its own gradients,
for the time of the forward and backward pass, and takes it back. To first order the mean over ranks is then what it
would be after the step with the mean, wherever ranks have the same curvature; on one rank nothing is late at all.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from renkei.optim.structure import parameters_of


class LookAhead:
    """Makes steps of an optimizer that can be taken back.

    Args:
        inner: makes the steps; neither its state nor its hooks notice.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._exact: list[tuple[Parameter, Tensor]] = []
        self._memory = _Memory()
        self._gone_with: Sequence[Tensor | None] | None = None

    def go(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Be where a step with these gradients leads to; if that was done already, with the same list, do nothing."""
        if gradients is self._gone_with:
            return
        self.come_back()
        given = {parameter: gradient for parameter, gradient in zip(parameters, gradients, strict=True)}
        everyone = parameters_of(self._inner)
        before = [parameter.grad for parameter in everyone]
        self._exact = [
            (parameter, self._memory.copy((parameter, None), parameter))
            for parameter in everyone
            if given.get(parameter) is not None
        ]
        try:
            for parameter in everyone:
                parameter.grad = given.get(parameter)
            with _unnoticed(self._inner, self._memory):
                self._inner.step()
        finally:
            for parameter, gradient in zip(everyone, before, strict=True):
                parameter.grad = gradient
        self._gone_with = gradients

    @torch.no_grad()
    def come_back(self) -> None:
        """Undo the step, if one was made."""
        for parameter, exact in self._exact:
            parameter.copy_(exact)
        self._exact, self._gone_with = [], None


class _Memory:
    """Copies that are made anew in each step, in the same memory: new pages cost several times what a copy does."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy of what is called that; it overwrites the last one."""
        kept = self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (tensor.shape, tensor.dtype, tensor.device):
            self._kept[key] = kept = torch.empty_like(tensor, requires_grad=False)
        return kept.copy_(tensor.detach())


def watch_forward(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call something before each forward pass of a model that a gradient may be computed of; weakly."""
    return model.register_forward_pre_hook(_BeforeForward(weakref.ref(model), weakref.WeakMethod(call)))


class _BeforeForward:
    """The hook. Its copies, which copies of the model have (averages of its weights, say), do nothing."""

    def __init__(self, model: Callable[[], Any] = lambda: None, call: Callable[[], Any] = lambda: None) -> None:
        self._model, self._call = model, call

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        call = self._call()
        if call is not None and module.training and torch.is_grad_enabled() and module is self._model():
            call()

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeforeForward:
        return _BeforeForward()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


@contextmanager
def _unnoticed(optimizer: Optimizer, memory: _Memory) -> Iterator[None]:
    """Whatever a step changes but for the parameters is as before on leaving, and no hook is called."""
    state, groups = optimizer.state, [dict(group) for group in optimizer.param_groups]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    copied = {
        parameter: {
            name: memory.copy((parameter, name), value) if isinstance(value, Tensor) else value
            for name, value in its.items()
        }
        for parameter, its in state.items()
    }
    optimizer.state = type(state)(state.default_factory, copied)
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer.state = state
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
