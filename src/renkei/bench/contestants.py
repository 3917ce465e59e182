"""Who can be timed replacing a buffer by its sum over ranks: communicators, and the peers of `PEERS`.

A peer is added by one function here, which yields a `Contestant` for as long as what it talks over is open, and by its
name in `renkei.cli.bench_all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.bench import mpi_peers as mpi
from renkei.bench.bandwidth import COPY
from renkei.bench.default_group import default_group
from renkei.communicators.communicator import Communicator

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
Job = tuple[Tensor, Callable[[], object]]  # a buffer, and what replaces it by its sum over ranks


@dataclass(frozen=True)
class Contestant:
    """One who can be timed.

    Attributes:
        communicator, backend: as in `renkei.bench.bandwidth.AllReduceTime`.
        prepare: gives a flat buffer of so many elements, and the function that adds it; both may be used within.
        dtypes: that it can add.
    """

    communicator: str
    backend: str | None
    prepare: Callable[[int, torch.dtype], AbstractContextManager[Job]]
    dtypes: tuple[str, ...] = tuple(DTYPES)

    @property
    def who(self) -> tuple[str, str | None]:
        """Communicator and backend."""
        return self.communicator, self.backend


def communicator(comm: Communicator) -> Contestant:
    """One of Renkei's, used as for gradients."""

    @contextmanager
    def prepare(numel: int, dtype: torch.dtype) -> Iterator[Job]:
        buffer = comm.allocate(numel, dtype, comm.device)
        yield buffer, lambda: comm.start_sum(buffer, [buffer]).wait()

    return Contestant(comm.name, comm.options.backends, prepare)


def copy(comm: Communicator) -> Contestant:
    """No sum: every rank copies the buffer, which is the least that an all-reduce does with memory."""

    @contextmanager
    def prepare(numel: int, dtype: torch.dtype) -> Iterator[Job]:
        source = torch.ones(numel, dtype=dtype, device=comm.device)
        target = torch.ones_like(source)
        yield source, lambda: target.copy_(source)

    return Contestant(COPY, None, prepare)


@contextmanager
def _gloo(comm: Communicator) -> Iterator[Contestant]:
    """torch's own all-reduce, as users without Renkei call it."""

    @contextmanager
    def prepare(numel: int, dtype: torch.dtype) -> Iterator[Job]:
        buffer = torch.ones(numel, dtype=dtype, device=comm.device)
        yield buffer, lambda: dist.all_reduce(buffer)

    with default_group(comm, "gloo"):
        yield Contestant("gloo", None, prepare)


@contextmanager
def _mpi4py(comm: Communicator) -> Iterator[Contestant]:
    """MPI's own all-reduce."""
    world = mpi.world_of(comm, "mpi4py")

    @contextmanager
    def prepare(numel: int, dtype: torch.dtype) -> Iterator[Job]:
        buffer = torch.ones(numel, dtype=dtype)
        yield buffer, mpi.all_reduce(world, buffer.numpy())

    yield Contestant("mpi4py", None, prepare, mpi.DTYPES)


@contextmanager
def _mpi_shared(comm: Communicator) -> Iterator[Contestant]:
    """What is written by hand where ranks share a host: sums in memory that MPI lets all of them see."""
    world = mpi.world_of(comm, "mpi-shared")
    mpi.check_one_host(world)

    @contextmanager
    def prepare(numel: int, dtype: torch.dtype) -> Iterator[Job]:
        with mpi.shared_arrays(world, numel, torch.empty(0, dtype=dtype).numpy().dtype) as (arrays, window):
            yield torch.from_numpy(arrays[world.rank]), mpi.sum_in_shared_memory(world, window, arrays)

    yield Contestant("mpi-shared", None, prepare, mpi.DTYPES)


PEERS: dict[str, Callable[[Communicator], AbstractContextManager[Contestant]]] = {
    "gloo": _gloo,
    "mpi4py": _mpi4py,
    "mpi-shared": _mpi_shared,
}
