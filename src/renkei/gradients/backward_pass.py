"""What can be known from inside a backward pass: which one it is, whether another runs around it, when it ends.

The only place that touches autograd's engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

_RUN = torch.autograd.graph._engine_run_backward.__code__


def current_backward() -> int:
    """A number that identifies the backward pass this thread is in."""
    return torch._C._current_graph_task_id()


def is_nested(parameter: Tensor) -> bool:
    """Whether the backward pass that just computed `parameter`'s gradient was begun by another one.

    Reentrant checkpointing does that. Each backward pass begun from Python has a frame of `_engine_run_backward` on
    the stack of the thread that began it. Gradients of CPU parameters are computed on that thread; those of an
    accelerator on a thread of the engine's own, where only nested passes have such a frame.
    """
    depth, frame = 0, sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _RUN
        frame = frame.f_back  # type: ignore[assignment]
    return depth > (1 if parameter.device.type == "cpu" else 0)


def when_it_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass has computed everything; its exceptions leave ``backward()``."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
