"""Making MPI communicators for some of the ranks that MPI knows."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from renkei.communicators.backends.mpi.implementation import find_problem, load
from renkei.communicators.channel import translate
from renkei.communicators.timeouts import milliseconds
from renkei.communicators.work_queue import Operation
from renkei.errors import DeadlineError, LaunchError, afresh

_TAGS = 32768  # as many as every MPI has


class Meeting(NamedTuple):
    """What comes of it.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        comm, comm_for_messages: MPI communicators of the ranks that have met.
        name: of the group, the same on all its ranks and no other's.
    """

    mpi: Any
    comm: Any
    comm_for_messages: Any
    name: str


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> Meeting:
    """Make MPI communicators of `size` ranks, which find one another in `store`.

    Each rank says there which of MPI's ranks it is, or why it is none: an error on all of them, then, and no wait.
    """
    mpi, place = _own_place(size)
    try:
        places, name = _exchange_places(store, rank, size, place, milliseconds(timeout))
    except RuntimeError as error:
        raise translate(error, rank=rank, doing="meeting the other ranks for MPI") from None
    _check_places(places)

    def create() -> tuple[Any, Any]:
        comm = mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.group.Incl(places), int(name, 16) % _TAGS)
        return comm, comm.Dup()

    comm, comm_for_messages = within(timeout, create, f"rank {rank}: making an MPI communicator of {size} ranks")
    return Meeting(mpi, comm, comm_for_messages, name)


def _own_place(size: int) -> tuple[Any, int | str]:
    try:
        mpi = load()
    except LaunchError as error:
        return None, str(error)
    problem = find_problem(mpi, size)
    return mpi, mpi.COMM_WORLD.rank if problem is None else problem


def _exchange_places(
    store: dist.Store, rank: int, size: int, place: int | str, timeout: timedelta
) -> tuple[list[int | str], str]:
    """Every rank's place, and a name for all. Rank 0 collects, so that a thousand ranks don't read a thousand keys."""
    store.set(f"place/{rank}", json.dumps(place))
    if rank == 0:
        store.wait([f"place/{other}" for other in range(size)], timeout)
        places = [json.loads(store.get(f"place/{other}")) for other in range(size)]
        store.set("places", json.dumps([places, secrets.token_hex(8)]))
    store.wait(["places"], timeout)
    places, name = json.loads(store.get("places"))
    return places, name


def _check_places(places: list[int | str]) -> None:
    for rank, place in enumerate(places):
        if isinstance(place, str):
            raise LaunchError(f"rank {rank}: {place}")
        if place in places[:rank]:
            raise LaunchError(
                f"ranks {places.index(place)} and {rank} are both rank {place} of their MPI, so they belong to two "
                "runs of mpiexec; start all ranks by one"
            )


def within(seconds: float, make: Callable[[], Any], doing: str) -> Any:
    """What `make` returns, which waits for other ranks and can't be told for how long.

    Raises:
        DeadlineError: it took longer; it still waits, on a thread of its own.
    """
    made: list[Any] = []
    operation = Operation(lambda: made.append(make()))
    threading.Thread(target=operation.perform, name="renkei mpi meeting", daemon=True).start()
    if not operation.await_end(seconds):
        raise DeadlineError(f"{doing}: timed out after {seconds:g} s; do all ranks get there?")
    if operation.error is not None:
        raise afresh(operation.error)
    return made[0]
