"""Backends of our own for torch.distributed. Importing this makes torch know them; nothing is loaded until one is used.

import renkei.communicators.backends
torch.distributed.init_process_group("mpi-renkei", init_method="renkei-mpi://")
torch.distributed.init_process_group("shared-memory-renkei")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

MPI_SCHEME = "renkei-mpi"


def _create_over_mpi(options: Any, _: Any) -> dist.ProcessGroup:
    from renkei.communicators.backends.mpi.transport import create_mpi_transport
    from renkei.communicators.backends.process_group import TransportGroup

    seconds = options.timeout.total_seconds()
    return TransportGroup(create_mpi_transport(options.store, options.group_rank, options.group_size, seconds))


def _create_in_shared_memory(options: Any, _: Any) -> dist.ProcessGroup:
    from renkei.communicators.backends.process_group import TransportGroup
    from renkei.communicators.backends.shared_memory.transport import SharedMemoryTransport
    from renkei.communicators.platforms import check_shared_memory

    check_shared_memory()
    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    return TransportGroup(SharedMemoryTransport(options.store, rank=rank, size=size, timeout=seconds))


def _meet_over_mpi(*arguments: Any, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    from renkei.communicators.backends.mpi.rendezvous import rendezvous

    return rendezvous(*arguments, **options)


# By name, what makes a group of the ranks that torch has chosen.
BACKENDS: dict[str, Callable[[Any, Any], dist.ProcessGroup]] = {
    "mpi-renkei": _create_over_mpi,
    "shared-memory-renkei": _create_in_shared_memory,
}


def register() -> None:
    """Make torch know these backends, and how ranks meet over MPI. Once is enough, more often does no harm."""
    for name, create in BACKENDS.items():
        if name not in dist.Backend.backend_list:
            # tensors on a GPU go through the host's memory where a backend doesn't take them as they are
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    if MPI_SCHEME not in _rendezvous_handlers:
        register_rendezvous_handler(MPI_SCHEME, _meet_over_mpi)


register()
