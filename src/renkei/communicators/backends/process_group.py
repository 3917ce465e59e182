"""A process group of torch over one of our transports: what DDP, FSDP, DCP, DeviceMesh and the rest call.

Torch 2.13 renamed some methods; Python calls the new names and C++ and older Python the old ones, so both are there.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators.backends.flattening import (
    as_bytes,
    flatten,
    is_same_memory,
    num_bytes,
    put_back,
    share_memory,
    split_sizes,
    tensors_in,
)
from renkei.communicators.backends.transport import Transport
from renkei.communicators.backends.work import TransportWork
from renkei.communicators.cuda_streams import beside_computation
from renkei.communicators.reduction import Reduction
from renkei.communicators.through_host import through_host
from renkei.communicators.work_queue import Operation, Transfer, WorkQueue
from renkei.errors import DeadlineError, afresh

_REDUCTIONS: dict[Any, Reduction] = {
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean", dist.ReduceOp.PRODUCT: "product", dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max", dist.ReduceOp.BAND: "band", dist.ReduceOp.BOR: "bor", dist.ReduceOp.BXOR: "bxor",
}  # fmt: skip
_CPU = torch.device("cpu")
_SHORT = 2**20  # bytes up to which an operation is left to whoever waits for it: to wake a thread takes a third as long


class TransportGroup(dist.ProcessGroup):
    """A group of ranks whose operations a transport does, one after the other, beside what their callers do.

    Attributes:
        transport: does them.
        bytes_moved: by operation, how many bytes of this rank's tensors were given to the transport so far.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.rank, transport.size)  # type: ignore[call-arg] # not in torch's stubs
        self.transport = transport
        self.bytes_moved: Counter[str] = Counter()
        self._line = WorkQueue(transport.name)
        self._name, self._description = "", transport.name
        self._shut_down = weakref.finalize(self, _shut_down, transport, self._line, os.getpid())

    # -- what torch asks for by these names -----------------------------------------------------------------------

    def getBackendName(self) -> str:
        return self.transport.name

    def name(self) -> str:
        return self.transport.name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def shutdown(self) -> None:
        """Let go of the transport; what is on its way fails. Done by itself at exit, or when nobody refers to this."""
        self._shut_down()

    def abort(self) -> None:
        self.shutdown()

    # -- reductions -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.start_reduction(tensors, _reduction(opts))

    def start_reduction(self, tensors: list[Tensor], reduction: Reduction) -> dist.Work:
        """Begin to replace tensors by their reductions over ranks."""
        if len(tensors) == 1 and self._line.is_idle:
            transfer = self.transport.begin_all_reduce(tensors[0], reduction)
            if transfer is not None:
                self.bytes_moved["allreduce"] += num_bytes(tensors[0])
                return TransportWork(transfer, self.transport.timeout, tensors)

        def run() -> None:
            for tensor in tensors:
                self._change(tensor, lambda flat: self.transport.all_reduce(flat, reduction))

        return self._submit("allreduce", tensors, tensors, run)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        reduction, is_root = _reduction(opts), opts.rootRank == self.rank()

        def run() -> None:
            for tensor in tensors:
                flat = self._flat(tensor, own=True)
                self.transport.all_reduce(flat, reduction)
                if is_root:
                    put_back(flat, tensor)

        return self._submit("reduce", tensors, tensors, run)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        reduction = _reduction(opts)

        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = self._flat(output)
                self.transport.reduce_scatter(flat, self._flat(tensor), reduction)
                put_back(flat, output)

        return self._submit("reduce_scatter", inputs, outputs, run)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        reduction = _reduction(opts)

        def run() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                whole = torch.cat([self._flat(tensor) for tensor in tensors])
                self.transport.all_reduce(whole, reduction)  # the parts may be of different sizes
                put_back(whole.split([tensor.numel() for tensor in tensors])[self.rank()], output)

        return self._submit("reduce_scatter", [each for some in inputs for each in some], outputs, run)

    def start_slices(self, half: str, tensor: Tensor, num_slices: int) -> dist.Work:
        """Begin to "reduce" slices of a flat tensor, or to "gather" them, where the transport has that."""
        halves = {"reduce": self.transport.reduce_slices, "gather": self.transport.gather_slices}
        return self._submit(f"{half} slices", [tensor], [tensor], lambda: halves[half](tensor, num_slices))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros in host memory that `allreduce` handles best; all ranks do it together."""
        made: list[Tensor] = []
        self._submit("allocate", [], made, lambda: made.append(self.transport.allocate(numel, dtype))).wait()
        return made[0]

    # -- movement -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def run() -> None:
            for tensor in tensors:
                self._change(tensor, lambda flat: self.transport.broadcast(as_bytes(flat), opts.rootRank))

        return self._submit("broadcast", tensors, tensors, run)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = self._flat(output)
                mine = self._flat(tensor, own=share_memory(output, tensor))  # FSDP gathers in place
                self.transport.all_gather(as_bytes(flat), as_bytes(mine))
                put_back(flat, output)

        return self._submit("allgather", inputs, outputs, run)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            for them, tensor in zip(outputs, inputs, strict=True):
                flat = self._flat(tensor)
                everyone = flat.new_empty(self.size(), flat.numel())
                self.transport.all_gather(as_bytes(everyone.view(-1)), as_bytes(flat))
                for output, row in zip(them, everyone, strict=True):
                    put_back(row, output)

        return self._submit("allgather", inputs, outputs, run)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        by_tensor = [list(them) for them in zip(*outputs, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        def run() -> None:
            flat = self._flat(inputs[0])
            everyone = flat.new_empty(self.size(), flat.numel()) if opts.rootRank == self.rank() else None
            everyones_bytes = None if everyone is None else as_bytes(everyone.view(-1))
            self.transport.gather(everyones_bytes, as_bytes(flat), opts.rootRank)
            if everyone is not None:
                for output, row in zip(outputs[0], everyone, strict=True):
                    put_back(row, output)

        return self._submit("gather", inputs, outputs, run)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        def run() -> None:
            flat = self._flat(outputs[0])
            parts = None
            if opts.rootRank == self.rank():
                parts = as_bytes(torch.cat([self._flat(tensor) for tensor in inputs[0]]))
            self.transport.scatter(as_bytes(flat), parts, opts.rootRank)
            put_back(flat, outputs[0])

        return self._submit("scatter", [each for some in inputs for each in some], outputs, run)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """The sizes count along the first dimension; none means equal parts."""

        def run() -> None:
            flat = self._flat(output)
            received, sent = (
                split_sizes(whole, sizes, self.size()) for whole, sizes in ((output, recv_sizes), (tensor, send_sizes))
            )
            self.transport.all_to_all(as_bytes(flat), as_bytes(self._flat(tensor)), received, sent)
            put_back(flat, output)

        return self._submit("all_to_all", [tensor], [output], run)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            sent = torch.cat([as_bytes(self._flat(tensor)) for tensor in inputs])
            recv_sizes = [num_bytes(output) for output in outputs]
            received = sent.new_empty(sum(recv_sizes))
            self.transport.all_to_all(received, sent, recv_sizes, [num_bytes(tensor) for tensor in inputs])
            for output, part in zip(outputs, received.split(recv_sizes), strict=True):
                put_back(part.clone().view(output.dtype), output)

        return self._submit("all_to_all", inputs, outputs, run)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit("barrier", [], [], self.transport.barrier)

    # -- from one rank to another ---------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dest: int, tag: int = 0) -> dist.Work:
        data = as_bytes(self._flat(tensors[0], is_ready=True))
        return self._transfer("send", data, tensors, self.transport.send(data, dest, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: list[Tensor], source: int | None, tag: int) -> dist.Work:
        (tensor,) = tensors
        flat = self._flat(tensor)
        transfer = self.transport.recv(as_bytes(flat), source, tag)
        if not is_same_memory(flat, tensor):
            transfer = _followed_by(transfer, lambda: put_back(flat, tensor))
        return self._transfer("recv", as_bytes(flat), tensors, transfer)

    def _transfer(self, operation: str, data: Tensor, result: Any, transfer: Transfer) -> dist.Work:
        self.bytes_moved[operation] += data.numel()
        return TransportWork(transfer, self.transport.timeout, result)

    # -- both names -----------------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- how ------------------------------------------------------------------------------------------------------

    def _submit(self, operation: str, inputs: Sequence[Tensor], result: Any, run: Callable[[], None]) -> dist.Work:
        moved = sum(map(num_bytes, inputs))
        self.bytes_moved[operation] += moved
        on_gpu = next((tensor for tensor in tensors_in([*inputs, result]) if tensor.is_cuda), None)
        if on_gpu is not None:
            run = beside_computation(run, on_gpu.device)
        transfer = self._line.transfer(run, hurry=moved > _SHORT, limit=self.transport.timeout)
        return TransportWork(transfer, self.transport.timeout, result)

    def _change(self, tensor: Tensor, act: Callable[[Tensor], None]) -> None:
        """Let the transport change a tensor's elements, where it can reach them."""
        flat = flatten(tensor, own=False, on_host=False)
        if flat.is_cuda:  # a copy that was made of the tensor has been begun only
            torch.cuda.current_stream(flat.device).synchronize()
        if flat.is_cuda and not self.transport.takes_gpu_memory:
            through_host(flat, act)
        else:
            act(flat)
        put_back(flat, tensor)

    def _flat(self, tensor: Tensor, *, own: bool = False, is_ready: bool = False) -> Tensor:
        """The elements in a row, where the transport can reach them: in the tensor's own memory unless `own`."""
        if tensor.is_cuda and is_ready:
            torch.cuda.current_stream(tensor.device).synchronize()
        return flatten(tensor, own=own, on_host=not self.transport.takes_gpu_memory)


def _shut_down(transport: Transport, line: WorkQueue, pid: int) -> None:
    if os.getpid() != pid:  # a forked child, whose connections are its parent's
        return
    transport.interrupt()
    line.close()
    transport.close()


def _followed_by(transfer: Transfer, then: Callable[[], None]) -> Transfer:
    """A message and what is to be done once it has come, whoever waits for it and however often."""
    followed = Operation(then)

    def follow() -> None:
        if transfer.operation.error is None:
            followed.perform()
        else:
            followed.fail(transfer.operation.error)

    def wait(seconds: float) -> None:
        transfer.wait(seconds)
        if not followed.await_end(seconds):
            raise DeadlineError(f"timed out: what came was not in place after {seconds:g} s")
        if followed.error is not None:
            raise afresh(followed.error)

    transfer.operation.when_done(follow)
    return transfer._replace(operation=followed, wait=wait)


def _reduction(opts: Any) -> Reduction:
    if opts is None:
        return "sum"
    operation = opts.reduceOp
    try:
        return _REDUCTIONS[getattr(operation, "op", operation)]
    except KeyError:
        raise RuntimeError(f"{operation} is not available; use one of {', '.join(_REDUCTIONS.values())}") from None
