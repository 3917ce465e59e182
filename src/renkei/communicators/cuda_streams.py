"""Work on GPU tensors by other threads than the one that computes, each on a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def beside_computation(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same to be done later, by any thread: after what has been begun here by now; all is in place when it returns.

    On a thread's usual stream it would stand in line behind what is computed meanwhile.
    """
    begun = torch.cuda.current_stream(device).record_event()

    def then() -> None:
        with torch.cuda.stream(_own_stream(device)):
            begun.synchronize()
            run()
            torch.cuda.current_stream(device).synchronize()

    return then


_streams = threading.local()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's: memory that was freed is used again only on the stream it was used on."""
    by_device = _streams.__dict__.setdefault("by_device", {})
    if device not in by_device:
        by_device[device] = torch.cuda.Stream(device)
    return by_device[device]
