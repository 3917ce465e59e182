"""Sums over MPI without Renkei: MPI's own, and the one written by hand for ranks that share memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.launch.environments import detect

DTYPES = ("float32", "float64")  # that both NumPy and MPI know

_WITHOUT_MPI = ("renkei", "torchrun", "variables")  # launchers whose ranks are to MPI a job of one each
Array = np.ndarray[Any, Any]
_CHUNK = 2**17  # bytes of each rank's that are added at once; what is read and written then stays in a core's cache


def world_of(comm: Communicator, peer: str) -> Any:
    """MPI's communicator of the same ranks.

    Raises:
        UsageError: there is no MPI, or it doesn't know these ranks as one job, or they compute elsewhere.
    """
    if comm.device.type != "cpu":
        raise UsageError(f"peer {peer!r} adds in host memory, but this rank computes on {comm.device}; leave it out")
    launcher = detect(os.environ).launcher
    if comm.size > 1 and launcher in _WITHOUT_MPI:
        raise UsageError(f"peer {peer!r} needs ranks that mpiexec has started, but {launcher} has started these")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(f"peer {peer!r}: mpi4py doesn't load ({error}); pip install 'renkei[mpi]'") from None
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (comm.rank, comm.size):
        raise UsageError(
            f"peer {peer!r}: rank {comm.rank} of {comm.size} is to MPI rank {world.rank} of {world.size}; "
            "start all ranks by the mpiexec of the MPI that mpi4py loads"
        )
    return world


def check_one_host(world: Any) -> None:
    """Raise `UsageError` on every rank unless all can share memory."""
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    fewest = world.allreduce(node.size, MPI.MIN)
    node.Free()
    if fewest < world.size:
        raise UsageError("peer 'mpi-shared' needs all ranks on one host, but they run on several; leave it out")


def all_reduce(world: Any, array: Array) -> Callable[[], object]:
    """What replaces an array by its sum over ranks, by MPI's own means."""
    from mpi4py import MPI

    return lambda: world.Allreduce(MPI.IN_PLACE, array)


@contextmanager
def shared_arrays(world: Any, numel: int, dtype: np.dtype[Any]) -> Iterator[tuple[list[Array], Any]]:
    """By rank, its flat array of zeros, which all ranks see; and the window they are in."""
    from mpi4py import MPI

    # pages of its own for each rank, which so has them near
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    window = MPI.Win.Allocate_shared(numel * dtype.itemsize, dtype.itemsize, info, world)
    info.Free()
    memories: list[Any] = [window.Shared_query(rank)[0] for rank in range(world.size)]
    arrays = [np.frombuffer(memory, dtype)[:numel] for memory in memories]
    arrays[world.rank].fill(0)
    window.Lock_all(MPI.MODE_NOCHECK)
    yield arrays, window
    # all ranks do this together, so not if one of them has failed
    window.Unlock_all()
    window.Free()


def sum_in_shared_memory(world: Any, window: Any, arrays: Sequence[Array]) -> Callable[[], None]:
    """What replaces every rank's array by their sum: each rank adds its own part of all of them, and writes it to all.

    In chunks, so that each is read from memory once and written once, and is still in the cache in between.
    """
    own = arrays[world.rank]
    others = [array for rank, array in enumerate(arrays) if rank != world.rank]
    begin, end = (len(own) * rank // world.size for rank in (world.rank, world.rank + 1))
    step = max(1, _CHUNK // own.itemsize)
    chunks = [slice(at, min(at + step, end)) for at in range(begin, end, step)]

    def meet() -> None:
        window.Sync()  # what this rank has written is there for others, and the other way round
        world.Barrier()
        window.Sync()

    def add() -> None:
        meet()
        for chunk in chunks:
            total = own[chunk]
            for other in others:
                np.add(total, other[chunk], out=total)
            for other in others:
                other[chunk] = total
        meet()

    return add
