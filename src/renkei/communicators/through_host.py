"""What is on a GPU by way of the host's memory, for what can't reach a GPU's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PIECE = 2**22  # bytes; large enough that a copy runs at full speed, small enough that little is left to wait for


def through_host(flat: Tensor, act: Callable[[Tensor], None], piece: int = PIECE) -> None:
    """Let `act` change a flat tensor in place, a copy of each piece of so many bytes after the other, on the host.

    All pieces are on their way there from the beginning, and each goes back while the next is acted on. The host's
    memory is pinned, so that copies don't wait for one another. On return all is in place.

    Args:
        flat: is complete: nothing that is still to be computed.
        act: ranks that do this together get as many pieces, of the same sizes.
    """
    here = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.is_cuda)
    numel = max(1, piece // flat.element_size())
    pieces = list(zip(here.split(numel), flat.split(numel), strict=True))
    # streams of their own: on the current one copies would stand in line behind what is computed meanwhile
    coming, going = (torch.cuda.Stream(flat.device) if flat.is_cuda else None for _ in range(2))
    arrivals = [_copy(on_gpu, on_host, coming) for on_host, on_gpu in pieces]
    returns = []
    for (on_host, on_gpu), arrived in zip(pieces, arrivals, strict=True):
        arrived()
        act(on_host)
        returns.append(_copy(on_host, on_gpu, going))
    for returned in returns:
        returned()


def _copy(source: Tensor, target: Tensor, stream: torch.cuda.Stream | None) -> Callable[[], object]:
    """Begin to copy; returns what waits for the end."""
    with torch.cuda.stream(stream):  # of None, that does nothing
        target.copy_(source, non_blocking=True)
    return (lambda: None) if stream is None else stream.record_event().synchronize
