"""Messages from one rank to another over MPI."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from renkei.communicators.backends.mpi.memory import Memory
from renkei.communicators.backends.mpi.requests import Request, Requests
from renkei.communicators.work_queue import Transfer
from renkei.errors import MismatchError


class Messages:
    """Sends and receives beside collectives, over an MPI communicator of its own.

    A message is begun where it is asked for, which keeps the order. A send is complete when the receiver has begun to
    receive, as with Gloo: so a message to a rank that has left is an error.
    """

    def __init__(self, comm: Any, memory: Memory, requests: Requests) -> None:
        self._comm, self._memory, self._requests = comm, memory, requests

    def send(self, data: Tensor, dest: int, tag: int) -> Transfer:
        """Begin to send bytes."""
        began = self._comm.Issend(self._memory.parts(data), dest, tag)
        request = Request(self._requests, began, data, f"send to rank {dest}", partial(self._find_lost, dest))
        return Transfer(request, request.wait)

    def recv(self, data: Tensor, source: int | None, tag: int) -> Transfer:
        """Begin to receive bytes."""
        mpi, rank = self._requests.mpi, self._requests.rank
        doing = "recv from any rank" if source is None else f"recv from rank {source}"
        status = mpi.Status()

        def check_length() -> None:
            count = status.Get_elements(mpi.BYTE)
            if count != data.numel():
                raise MismatchError(f"rank {rank}: {doing}: {count} bytes came, {data.numel()} were expected")

        began = self._comm.Irecv(self._memory.parts(data), mpi.ANY_SOURCE if source is None else source, tag)
        lost = partial(self._find_lost, source)
        request = Request(self._requests, began, data, doing, lost, finish=check_length, status=status)
        return Transfer(request, request.wait, source=status.Get_source)

    def _find_lost(self, peer: int | None, left: Mapping[int, int]) -> int | None:
        """The peer if it has left, or, where it may be any rank, one of them if all have."""
        if peer is None:
            return min(left) if len(left) == self._comm.size - 1 else None
        return peer if peer in left else None
