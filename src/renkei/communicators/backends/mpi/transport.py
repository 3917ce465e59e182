"""Collectives over MPI, by mpi4py: each is begun and then asked for, so that no wait lasts for ever."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from renkei.communicators.backends.mpi.arithmetic import find_way
from renkei.communicators.backends.mpi.farewells import Farewells
from renkei.communicators.backends.mpi.implementation import is_cuda_aware, translate
from renkei.communicators.backends.mpi.meeting import Meeting, meet
from renkei.communicators.backends.mpi.memory import CHUNK, Memory
from renkei.communicators.backends.mpi.messages import Messages
from renkei.communicators.backends.mpi.requests import Request, Requests, nothing
from renkei.communicators.backends.transport import Transport
from renkei.communicators.computable import halves
from renkei.communicators.reduction import Reduction, reduce_in_chunks
from renkei.communicators.work_queue import Transfer
from renkei.errors import MismatchError, RenkeiError, UsageError

_PATIENCE = 1.0  # seconds


def create_mpi_transport(store: dist.Store, rank: int, size: int, timeout: float) -> MpiTransport:
    """A transport among `size` ranks of this process's MPI, which find one another in `store`, used for nothing else.

    Raises:
        LaunchError: some rank can't use MPI; the same on every rank.
        PeerLostError, DeadlineError: another rank ended, or did not come.
    """
    met = meet(store, rank, size, timeout)
    return MpiTransport(met, Farewells(store, met.name, rank, size), timeout)


class MpiTransport(Transport):
    """Operations on two MPI communicators, one of which is for messages from rank to rank.

    Args:
        met: MPI, and communicators of the group, which are used and freed by this alone.
        farewells: how ranks learn that others have left.
        timeout: seconds that a collective may take.
        chunk: bytes that MPI gets to count one by one.
    """

    name = "mpi"

    def __init__(self, met: Meeting, farewells: Farewells, timeout: float, chunk: int = CHUNK) -> None:
        self.rank, self.size, self.timeout = met.comm.rank, met.comm.size, timeout
        self.takes_gpu_memory = is_cuda_aware()
        self._mpi, self._comm, self._comm_for_messages = met.mpi, met.comm, met.comm_for_messages
        self._farewells = farewells
        self._memory = memory = Memory(met.mpi, chunk)
        self._requests = Requests(met.mpi, self.rank, farewells)
        self._messages = Messages(met.comm_for_messages, memory, self._requests)
        self._find_way = functools.cache(lambda dtype, reduction: find_way(met.mpi, dtype, reduction, memory.chunk))
        self._guard = threading.Lock()  # held while a collective is begun
        self._num_begun = 0
        self._is_closed = self._has_left = False
        self._is_free = True  # of what MPI may still read or write

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        way = self._find_way(tensor.dtype, reduction)
        tensor = halves(tensor)
        for piece in (tensor,) if tensor.numel() <= way.numel else tensor.split(way.numel):
            if way.operation is not None:
                everyones = self._memory.elements(piece, way.kind)
                self._do("all_reduce", piece, self._comm.Iallreduce, self._mpi.IN_PLACE, everyones, way.operation)
                self._average(piece, reduction)
            else:
                sizes = [part.numel() for part in piece.tensor_split(self.size)]
                own = self._reduce_slices("all_reduce", piece, sizes, reduction)
                self._all_gather_slices(piece, own, sizes)

    def begin_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Transfer | None:
        if tensor.is_cuda or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            way = self._find_way(tensor.dtype, reduction)
            if way.operation is None or tensor.numel() > way.numel:
                return None
            everyones = self._memory.elements(tensor, way.kind)
            finish = nothing if reduction != "mean" else partial(self._average, tensor.detach(), reduction)
            begin, in_place = self._comm.Iallreduce, self._mpi.IN_PLACE
            request = self._begin("all_reduce", tensor, begin, in_place, everyones, way.operation, finish=finish)
        except RenkeiError:
            return None  # it is raised again where somebody waits
        return Transfer(request, request.wait)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        way = self._find_way(tensor.dtype, reduction)
        output, tensor = halves(output), halves(tensor)
        lane = max(1, way.numel // self.size)
        for begin in range(0, output.numel(), lane):
            piece = output[begin : begin + lane]
            lanes = tensor.view(self.size, -1)[:, begin : begin + lane].contiguous().view(-1)
            if way.operation is not None:
                own, sent = self._memory.elements(piece, way.kind), self._memory.elements(lanes, way.kind, self.size)
                begin_it = self._comm.Ireduce_scatter_block
                self._do("reduce_scatter", (lanes, piece), begin_it, sent, own, way.operation)
                self._average(piece, reduction)
            else:
                piece.copy_(self._reduce_slices("reduce_scatter", lanes, [piece.numel()] * self.size, reduction))
                self._memory.settle(piece)

    def _reduce_slices(self, doing: str, tensor: Tensor, sizes: Sequence[int], reduction: Reduction) -> Tensor:
        """This rank's slice of what 16-bit floats give over ranks; the slices have such sizes."""
        own_size = sizes[self.rank]
        parts = tensor.new_empty(self.size, own_size)
        sent = self._memory.slices(tensor, sizes, self._mpi.UINT16_T)
        received = self._memory.slices(parts, [own_size] * self.size, self._mpi.UINT16_T)
        self._do(doing, (tensor, parts), self._comm.Ialltoallv, sent, received)
        reduce_in_chunks(parts.unbind(), [parts[0]], reduction)
        return parts[0]

    def _all_gather_slices(self, tensor: Tensor, own: Tensor, sizes: Sequence[int]) -> None:
        sent = self._memory.elements(own, self._mpi.UINT16_T)
        received = self._memory.slices(tensor, sizes, self._mpi.UINT16_T)
        self._do("all_reduce", (tensor, own), self._comm.Iallgatherv, sent, received)

    def _average(self, total: Tensor, reduction: Reduction) -> None:
        if reduction == "mean":
            total.div_(self.size)
            self._memory.settle(total)

    # -- movement -------------------------------------------------------------------------------------------------

    def broadcast(self, data: Tensor, root: int) -> None:
        self._do("broadcast", data, self._comm.Ibcast, self._memory.parts(data), root)

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        sent, received = self._memory.parts(data), self._memory.parts(output, self.size)
        self._do("all_gather", (output, data), self._comm.Iallgather, sent, received)

    def gather(self, output: Tensor | None, data: Tensor, root: int) -> None:
        received = None if output is None else self._memory.parts(output, self.size)
        self._do("gather", (output, data), self._comm.Igather, self._memory.parts(data), received, root)

    def scatter(self, output: Tensor, data: Tensor | None, root: int) -> None:
        sent = None if data is None else self._memory.parts(data, self.size)
        self._do("scatter", (output, data), self._comm.Iscatter, sent, self._memory.parts(output), root)

    def all_to_all(self, output: Tensor, data: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int]) -> None:
        sent, received = data.split(list(send_sizes)), output.split(list(recv_sizes))
        statuses = {other: self._mpi.Status() for other in range(self.size) if other != self.rank}

        def begin() -> _Several:
            comm, parts = self._comm, self._memory.parts
            receives = [(comm.Irecv(parts(received[other]), other), status) for other, status in statuses.items()]
            return _Several([*receives, *((comm.Isend(parts(sent[other]), other), None) for other in statuses)])

        # Not Ialltoallv: it counts in 32 bits, and a rank doesn't know whether that is enough on all others.
        self._do("all_to_all", (output, data), begin)
        for other, status in statuses.items():
            count, expected = status.Get_elements(self._mpi.BYTE), received[other].numel()
            if count != expected:
                who = f"rank {self.rank}: all_to_all: from rank {other}"
                raise MismatchError(f"{who} {count} bytes came, {expected} were expected; sizes must fit")
        received[self.rank].copy_(sent[self.rank])
        self._memory.settle(output)

    def barrier(self) -> None:
        self._do("barrier", None, self._comm.Ibarrier)

    # -- from one rank to another ---------------------------------------------------------------------------------

    def send(self, data: Tensor, dest: int, tag: int) -> Transfer:
        self._check_open()
        return self._messages.send(data, dest, tag)

    def recv(self, data: Tensor, source: int | None, tag: int) -> Transfer:
        self._check_open()
        return self._messages.recv(data, source, tag)

    # -- how ------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        self._is_closed = True
        self._await_collectives()
        self._is_free = self._requests.give_up(RenkeiError(f"rank {self.rank}: the group was closed")) and self._is_free

    def close(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self.interrupt()
        self._requests.close()
        undone = self._requests.list_collectives()
        self._farewells.leave(min((each.number for each in undone), default=self._num_begun + 1) - 1)
        if self._is_free and not undone and not self._mpi.Is_finalized():
            self._comm_for_messages.Free()
            self._comm.Free()

    def _await_collectives(self) -> None:
        """Those on their way in which all ranks take part get a moment to come to their end."""
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RenkeiError):
            for request in self._requests.list_collectives():
                request.wait(deadline - time.monotonic())

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"rank {self.rank}: the group is closed")

    def _do(self, doing: str, held: Any, begin: Callable[..., Any], *arguments: Any) -> None:
        """Let MPI do something with all ranks; `held` is what it reads and writes."""
        self._begin(doing, held, begin, *arguments).wait(self.timeout)

    def _begin(
        self, doing: str, held: Any, begin: Callable[..., Any], *arguments: Any, finish: Callable[[], object] = nothing
    ) -> Request:
        with self._guard:
            self._check_open()
            self._requests.check_intact()
            try:
                began = begin(*arguments)
            except self._mpi.Exception as error:
                raise translate(self._mpi, error, rank=self.rank, doing=doing) from None
            self._num_begun += 1
            number, lost = self._num_begun, partial(_find_left_before, self._num_begun)
            return Request(self._requests, began, held, doing, lost, number=number, finish=finish, limit=self.timeout)


def _find_left_before(number: int, left: Mapping[int, int]) -> int | None:
    """A rank that has left before it took part in so many collectives."""
    return next((rank for rank, num_done in left.items() if num_done < number), None)


class _Several:
    """Requests of MPI that are asked for together."""

    def __init__(self, requests: Iterable[tuple[Any, Any]]) -> None:
        self._pending = list(requests)

    def Test(self, _: None = None) -> bool:
        self._pending = [(request, status) for request, status in self._pending if not request.Test(status)]
        return not self._pending
