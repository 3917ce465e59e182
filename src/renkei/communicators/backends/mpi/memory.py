"""Tensors as MPI takes them: an address, a count and a type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 2**30  # bytes or elements: MPI counted in 32 bits before its fourth version


class Memory:
    """Describes tensors, also those with more bytes than MPI counts.

    Args:
        chunk: bytes that are counted one by one; more of them count as one.
    """

    def __init__(self, mpi: Any, chunk: int = CHUNK) -> None:
        self._mpi, self.chunk = mpi, chunk
        self._types: dict[int, Any] = {}

    def elements(self, tensor: Tensor, kind: Any, num_parts: int = 1) -> list[Any]:
        """A flat tensor as elements of a type of MPI, in so many equal parts, of which each rank has one."""
        return [self._address(tensor), tensor.numel() // num_parts, kind]

    def parts(self, data: Tensor, num_parts: int = 1) -> list[Any]:
        """Bytes in so many equal parts, of which each rank has one."""
        num_bytes = data.numel() // num_parts
        if num_bytes <= self.chunk:
            return [self._address(data), num_bytes, self._mpi.BYTE]
        if num_bytes not in self._types:
            self._types[num_bytes] = self._make_type(num_bytes)
        return [self._address(data), 1, self._types[num_bytes]]

    def slices(self, tensor: Tensor, sizes: Sequence[int], kind: Any) -> list[Any]:
        """A flat tensor, of no more than a chunk, as slices of so many elements of a type of MPI."""
        return [self._address(tensor), list(sizes), kind]

    def settle(self, tensor: Tensor) -> None:
        """Return when what was begun to be computed is in place: MPI knows no streams, nor does who waits for it."""
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def _address(self, tensor: Tensor) -> Any:
        if tensor.is_cuda:
            self.settle(tensor)
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def _make_type(self, num_bytes: int) -> Any:
        """A type of many bytes. Kept, for sizes come again."""
        num_chunks, rest = divmod(num_bytes, self.chunk)
        chunk = self._mpi.BYTE.Create_contiguous(self.chunk)
        kind = self._mpi.Datatype.Create_struct(
            [num_chunks, rest], [0, num_chunks * self.chunk], [chunk, self._mpi.BYTE]
        )
        chunk.Free()
        return kind.Commit()
