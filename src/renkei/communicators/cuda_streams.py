"""Work on GPU tensors by other threads than the one that computes, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch


def beside_computation(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same to be done later, by any thread: after what has been begun here by now; all is in place when it returns.

    On a thread's usual stream it would stand in line behind what is computed meanwhile.
    """
    begun = torch.cuda.current_stream(device).record_event()

    def then() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            begun.synchronize()
            run()
            torch.cuda.current_stream(device).synchronize()

    return then
