"""An optimizer that is another one to all who look at it: schedulers, gradient scalers, checkpoints."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def _of_the_inner(name: str) -> Any:
    """A property that is the inner optimizer's."""

    def read(self: OptimizerWrapper) -> Any:
        return getattr(self.inner, name)

    def write(self: OptimizerWrapper, value: Any) -> None:
        setattr(self.inner, name, value)

    return property(read, write, doc=f"The inner optimizer's ``{name}``.")


class OptimizerWrapper(Optimizer):
    """Has the parameters, state and hooks of `inner`, forwarded by name.

    Attributes:
        inner: the wrapped optimizer.
    """

    # GradScaler would else leave the scale on the wrapper, where a fused inner optimizer doesn't look for it.
    _step_supports_amp_scaling = False

    param_groups = _of_the_inner("param_groups")
    state = _of_the_inner("state")
    defaults = _of_the_inner("defaults")
    _optimizer_step_pre_hooks = _of_the_inner("_optimizer_step_pre_hooks")
    _optimizer_step_post_hooks = _of_the_inner("_optimizer_step_post_hooks")
    _optimizer_state_dict_pre_hooks = _of_the_inner("_optimizer_state_dict_pre_hooks")
    _optimizer_state_dict_post_hooks = _of_the_inner("_optimizer_state_dict_post_hooks")
    _optimizer_load_state_dict_pre_hooks = _of_the_inner("_optimizer_load_state_dict_pre_hooks")
    _optimizer_load_state_dict_post_hooks = _of_the_inner("_optimizer_load_state_dict_post_hooks")

    def __init__(self, inner: Optimizer) -> None:
        # Not super().__init__(), which would make parameters' groups, state and hooks of its own.
        self.inner = inner
