"""Memory that all ranks of a host have mapped: anonymous files passed as descriptors, so nothing can be left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from renkei.communicators.backends.shared_memory.mesh import Mesh
from renkei.errors import UsageError
from renkei.machine import available_memory

_PAGE = mmap.PAGESIZE
_FINE = b"fine"


class Place(NamedTuple):
    """Where in shared memory a tensor lies: the same on all ranks if they allocated and cut alike.

    Attributes:
        segment: number of the segment, counted from 1; 0 for memory that isn't shared.
        offset: bytes from where this rank's part of it begins.
    """

    segment: int
    offset: int


PRIVATE = Place(0, 0)


class Segment:
    """One file, mapped by all ranks, with a part for each of them.

    Attributes:
        parts: by rank, its bytes.
    """

    def __init__(self, descriptor: int, num_ranks: int, part_size: int) -> None:
        self.mapping = mmap.mmap(descriptor, num_ranks * part_size)
        self.parts = torch.frombuffer(self.mapping, dtype=torch.uint8).view(num_ranks, part_size).unbind()


class Memory:
    """The segments of one group, each made by all ranks together."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._num_made = 0
        # by number: where this rank's own part begins and ends, and everybody's
        self._allocated: dict[int, tuple[int, int, Segment]] = {}

    def make(self, part_size: int) -> Segment:
        """A segment of zeros. Raises `UsageError` on all ranks where there isn't as much memory."""
        part_size = _in_pages(part_size)
        descriptor = self._share(part_size)
        try:
            return Segment(descriptor, self._mesh.size, part_size)
        finally:
            os.close(descriptor)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros of which all ranks reach one another's; its memory is freed when the last view has gone."""
        part_size = _in_pages(numel * dtype.itemsize)
        descriptor = self._share(part_size)
        try:
            segment = Segment(descriptor, self._mesh.size, part_size)
            own = mmap.mmap(descriptor, part_size, offset=self._mesh.rank * part_size)
        finally:
            os.close(descriptor)
        tensor = torch.frombuffer(own, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype, device="cpu")
        self._num_made += 1
        begin = tensor.data_ptr()
        self._allocated[self._num_made] = (begin, begin + part_size, segment)
        # torch keeps the mapping as long as any view of the tensor lives, and nobody else does
        weakref.finalize(own, self._allocated.pop, self._num_made, None).atexit = False
        return tensor

    def place(self, tensor: Tensor) -> Place:
        """Where a contiguous tensor lies."""
        address = tensor.data_ptr()
        for number, (begin, end, _) in self._allocated.copy().items():  # garbage collection may take one away
            if begin <= address < end:
                return Place(number, address - begin)
        return PRIVATE

    def everyones(self, place: Place, like: Tensor) -> list[Tensor]:
        """By rank, the flat tensor that lies there."""
        _, _, segment = self._allocated[place.segment]
        num_bytes = like.numel() * like.element_size()
        return [part[place.offset : place.offset + num_bytes].view(like.dtype) for part in segment.parts]

    def _share(self, part_size: int) -> int:
        """An open file that all ranks have, in which each has reserved its part."""
        rank, size = self._mesh.rank, self._mesh.size
        descriptor, problem = -1, _FINE
        try:
            if rank == 0:
                try:
                    descriptor = _create(size * part_size)
                except OSError as error:
                    problem = _too_small(rank, size, part_size, error)
                for other in range(1, size):
                    self._mesh.send(other, problem, [descriptor] if problem == _FINE else [])
            else:
                problem, descriptors = self._mesh.recv(0, 1)
                descriptor = descriptors[0] if descriptors else -1
            if problem == _FINE:
                try:  # now, for writing to memory that there isn't would end the process
                    os.posix_fallocate(descriptor, rank * part_size, part_size)
                except OSError as error:
                    problem = _too_small(rank, size, part_size, error)
            self._agree(problem)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        return descriptor

    def _agree(self, problem: bytes) -> None:
        """Raise on all ranks if one has a problem."""
        mesh = self._mesh
        if mesh.rank != 0:
            mesh.send(0, problem, [])
            problem, _ = mesh.recv(0, 0)
        else:
            said = [problem, *(mesh.recv(other, 0)[0] for other in range(1, mesh.size))]
            problem = next((each for each in said if each != _FINE), _FINE)
            for other in range(1, mesh.size):
                mesh.send(other, problem, [])
        if problem != _FINE:
            raise UsageError(problem.decode())


def _in_pages(num_bytes: int) -> int:
    """As many bytes in whole pages, at least one: each rank's part is then near the processor that uses it first."""
    return max(1, -(-num_bytes // _PAGE)) * _PAGE


def _create(num_bytes: int) -> int:
    if num_bytes > available_memory():  # asked for nevertheless, the kernel would end some process to find it
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    descriptor = os.memfd_create("renkei", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _too_small(rank: int, num_ranks: int, part_size: int, error: OSError) -> bytes:
    return (
        f"rank {rank}: this host has no {num_ranks} x {part_size / 2**20:.1f} MiB of shared memory left for its "
        f"{num_ranks} ranks ({error.strerror}); start fewer ranks, raise the limits on memory and on the size of files "
        "(ulimit -f), or use backend='gloo'"
    ).encode()
