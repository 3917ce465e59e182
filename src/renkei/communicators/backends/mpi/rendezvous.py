"""Beginning a job for torch with nothing but MPI: rank and size are MPI's, and rank 0 holds a store for all."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from renkei.communicators.backends.mpi.implementation import check_world, load
from renkei.communicators.backends.mpi.meeting import within
from renkei.communicators.timeouts import milliseconds
from renkei.errors import LaunchError
from renkei.failures import first_cause
from renkei.launch.rendezvous import open_listener

_TIMEOUT = timedelta(minutes=5)
_PATIENCE = 300.0  # seconds that rank 0 stays for the others
_NAP = 0.01  # seconds between two looks whether they have left


def rendezvous(url: str, timeout: timedelta = _TIMEOUT, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """What ``init_process_group(init_method="renkei-mpi://")`` calls: gives a store, the rank and the number of ranks.

    From then on, an uncaught exception ends this process at once, and the job by MPI_Abort; and rank 0, which holds the
    store, ends last.

    Raises:
        LaunchError: MPI can't be used, or rank 0 can't listen.
        DeadlineError: a rank did not come in time.
    """
    first_cause.install()
    mpi = load()
    check_world(mpi)
    world = mpi.COMM_WORLD
    seconds = timeout.total_seconds()
    comm, (address, port, listener) = within(
        seconds, lambda: (world.Dup(), agree_where(world)), f"rank {world.rank}: meeting the {world.size} ranks of MPI"
    )
    store = dist.TCPStore(
        address,
        port,
        is_master=listener is not None,
        timeout=milliseconds(seconds),
        wait_for_workers=False,
        **({"master_listen_fd": listener.detach()} if listener is not None else {}),
    )
    # at exit, after the groups that are made from now on; until then the store is kept, whoever destroys his group
    weakref.finalize(_leave, _leave, mpi, comm, os.getpid(), store)
    yield store, world.rank, world.size


def agree_where(comm: Any) -> tuple[str, int, socket.socket | None]:
    """Where rank 0 is to be met, and on rank 0 the socket for that; a collective operation of an MPI communicator.

    Raises:
        LaunchError: rank 0 can't listen; raised on all.
    """
    hosts = comm.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    listener, said = None, None
    if comm.rank == 0:
        try:
            listener = open_listener(address, 0)
            said = listener.getsockname()[1]
        except LaunchError as error:
            said = str(error)
    said = comm.bcast(said)
    if isinstance(said, str):
        raise LaunchError(said)
    return address, said, listener


def _leave(mpi: Any, comm: Any, pid: int, _: dist.Store) -> None:
    """Tell rank 0 that this rank has left; on rank 0, wait for the others, or until this process has failed."""
    if os.getpid() != pid or mpi.Is_finalized():
        return
    own = comm.rank == 0
    requests = [comm.Irecv([None, 0, mpi.BYTE], other) for other in range(1, comm.size)] if own else []
    requests += [] if own else [comm.Isend([None, 0, mpi.BYTE], 0)]
    deadline = time.monotonic() + _PATIENCE
    while not mpi.Request.Testall(requests) and time.monotonic() < deadline and not first_cause.FAILED.is_set():
        time.sleep(_NAP)
