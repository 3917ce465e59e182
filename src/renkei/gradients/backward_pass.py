"""What can be known from inside a backward pass: which one it is, whether another runs around it, when it ends.

The only place that touches autograd's engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_RUN = torch.autograd.graph._engine_run_backward.__code__
_BAGGAGE = "renkei"


class Endings:
    """Notices when the backward passes that compute an exchange's gradients end.

    Args:
        ended: called with whether the pass that has ended was begun by another one; not called for such a pass if
            the end of that other one will be noticed too.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended = ended
        self.restart()

    def restart(self) -> None:
        """The next exchange begins."""
        self._noticed: set[int] = set()
        self._is_outer_running = False

    def notice(self, parameter: Tensor) -> None:
        """Said in the backward pass that has just computed this parameter's gradient."""
        backward = torch._C._current_graph_task_id()
        if backward in self._noticed:
            return
        self._noticed.add(backward)
        nested = is_nested(parameter)
        self._is_outer_running |= not nested
        when_it_ends(partial(self._on_end, nested))

    def _on_end(self, nested: bool) -> None:
        if not nested:
            self._is_outer_running = False
        if not self._is_outer_running:
            self._ended(nested)


def is_nested(parameter: Tensor) -> bool:
    """Whether the backward pass that just computed `parameter`'s gradient was begun by another one.

    Reentrant checkpointing does that. Each backward pass begun from Python has a frame of `_engine_run_backward` on
    the stack of the thread that began it. Gradients of CPU parameters are computed on that thread; those of an
    accelerator on a thread of the engine's own, where only nested passes have such a frame.
    """
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _RUN
        frame = frame.f_back
    return depth > (1 if parameter.device.type == "cpu" else 0)


def when_it_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass has computed everything; its exceptions leave ``backward()``.

    Said from such a callback: when all those there are have been called.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextmanager
def carrying(baggage: object) -> Iterator[None]:
    """Let backward passes begun inside carry an object along, on whichever thread of the engine they compute."""
    before = carried()
    torch._C._stash_obj_in_tls(_BAGGAGE, baggage)
    try:
        yield
    finally:
        torch._C._remove_obj_from_tls(_BAGGAGE)
        if before is not None:
            torch._C._stash_obj_in_tls(_BAGGAGE, before)


def carried() -> Any:
    """What this backward pass carries along; None if nothing."""
    return torch._C._get_obj_in_tls(_BAGGAGE) if torch._C._is_key_in_tls(_BAGGAGE) else None
