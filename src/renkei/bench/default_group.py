"""The process group that users of torch have who don't use Renkei."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from renkei.communicators.communicator import Communicator


@contextmanager
def default_group(comm: Communicator, backend: str | None = None) -> Iterator[None]:
    """Within it, there is torch's default group of these ranks, with torch's own settings.

    Args:
        backend: one of torch's; by default NCCL if the communicator uses it, else Gloo.
    """
    if backend is None:
        backend = "nccl" if comm.options.backend == "nccl" else "gloo"
    store = dist.PrefixStore("bench/ddp", comm.store)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
