"""One process group of torch, reduced to what communicators need, with errors that say who waited for what."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators.backends.process_group import TransportGroup
from renkei.communicators.headers import Header, first_misfit, problem_with
from renkei.communicators.reduction import Reduction
from renkei.communicators.summation import ADDED_IN_32_BITS
from renkei.communicators.timeouts import is_timeout
from renkei.errors import DeadlineError, MismatchError, PeerLostError, RenkeiError, UsageError

_EXCERPT = 300  # characters of a long call that are shown
_NOT_FOR_USERS = re.compile(r"\[[^\]]*\.(cc|cpp|h):\d+\] ?|\.? *(This may indicate|GLHF).*")  # in Gloo's errors
OWN_TAG = 2**15 - 1  # of messages within collectives; users have those below. MPI promises as many tags.
_CPU = torch.device("cpu")


def _all_reduce_options(operation: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return options


# Made once: making one takes a tenth of a millisecond, at the moment when the last bucket should be on its way.
_REDUCTIONS = {
    "sum": _all_reduce_options(dist.ReduceOp.SUM),
    "product": _all_reduce_options(dist.ReduceOp.PRODUCT),
    "max": _all_reduce_options(dist.ReduceOp.MAX),
    "min": _all_reduce_options(dist.ReduceOp.MIN),
}


class Waitable(Protocol):
    """Work of torch, or anything that can be waited for like it."""

    def wait(self) -> object:
        """Return when it is complete, or raise."""


class Pending:
    """Operations on their way, and what is to be done once they are complete."""

    def __init__(
        self,
        works: Sequence[Waitable],
        *,
        rank: int = 0,
        doing: str = "",
        afterwards: Callable[[], object] | None = None,
    ) -> None:
        self._works, self._rank, self._doing, self._afterwards = list(works), rank, doing, afterwards
        self._is_abandoned = False

    def wait(self) -> None:
        """Return when complete; raise `PeerLostError` or `DeadlineError` if that can't be."""
        while self._works:
            try:
                self._works.pop(0).wait()
            except RenkeiError as error:  # from a transport of ours, which doesn't know what its message is for
                self.abandon()
                raise type(error)(f"{self._doing}: {error}" if self._doing else str(error)) from None
            except RuntimeError as error:
                self.abandon()
                raise translate(error, rank=self._rank, doing=self._doing) from None
        if self._is_abandoned:
            raise UsageError(f"rank {self._rank}: {self._doing or 'a message'} failed, or its communicator was closed")
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards()

    def abandon(self) -> None:
        """Let go of what is on its way, which would keep connections open as long as anything refers to this."""
        self._is_abandoned = True
        self._works.clear()
        self._afterwards = None


def translate(error: RuntimeError, *, rank: int, doing: str) -> RenkeiError:
    """Renkei's error for one that torch raised while this rank was `doing` something with others."""
    text = _NOT_FOR_USERS.sub("", next(iter(str(error).splitlines()), "")).strip() or type(error).__name__
    if is_timeout(text):
        return DeadlineError(f"rank {rank} waited too long for other ranks in {doing}: {text}; do all ranks get there?")
    if "onnection" in text or "peer" in text or "roken pipe" in text:
        return PeerLostError(f"rank {rank} lost another rank in {doing}: {text}; it failed or left early: see its log")
    return RenkeiError(f"rank {rank}: {doing} failed: {text}")


class Channel:
    """Messages among the ranks of one group.

    Methods that begin with ``start_`` return at once; the others when the message is through.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group: dist.ProcessGroup | None = group
        # by type of device: asking them directly saves a way through the dispatcher
        self._backends: dict[str, Any] = {}
        self.rank, self.size = rank, size
        self._calls = 0
        self._guard = threading.Lock()
        self._on_their_way: weakref.WeakSet[Pending] = weakref.WeakSet()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        if self._group is None:
            raise UsageError(f"rank {self.rank}: the communicator is closed")
        return self._group

    def check_open(self) -> None:
        """Raise `UsageError` if this was closed, also where no message would be needed."""
        _ = self.group

    def close(self) -> None:
        """Drop the connections, also if somebody still holds what was on its way, an exception's traceback say."""
        with self._guard:
            on_their_way = list(self._on_their_way)
        for pending in on_their_way:
            pending.abandon()
        group, self._group = self._group, None
        self._backends.clear()
        if isinstance(group, TransportGroup):
            group.shutdown()

    def _backend(self, tensor: Tensor) -> Any:
        kind = tensor.device.type
        if kind not in self._backends:
            ours = isinstance(self.group, TransportGroup)
            self._backends[kind] = self.group if ours else self.group._get_backend(tensor.device)
        return self._backends[kind]

    # -- agreement ------------------------------------------------------------------------------------------------

    def agree(
        self,
        operation: str,
        tensors: Sequence[Tensor] | None,
        *,
        root: int = 0,
        reduction: str = "sum",
        same_tensors: bool = False,
        same_dtype: bool = False,
        problem: str | None = None,
    ) -> list[Header]:
        """Tell all ranks what this one calls, and raise on all of them, with one text, if that doesn't fit together.

        Args:
            same_tensors: all ranks must bring the same number of tensors, of the same shapes and dtypes.
            same_dtype: all ranks must bring the same dtype.
            problem: what is wrong with this rank's own arguments, if anything.
        """
        self.check_open()
        self._calls += 1
        problem = problem or problem_with(tensors)
        if problem is None:
            mine = Header.of(operation, self._calls, tensors, root=root, reduction=reduction)
        else:
            mine = Header(operation, self._calls, refused=True)
        data = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
        headers = [Header.unpack(bytes(each.tolist())) for each in self.all_gather_equal(data, f"{operation}'s header")]
        refused = [rank for rank, header in enumerate(headers) if header.refused]
        misfit = first_misfit(headers, same_tensors=same_tensors, same_dtype=same_dtype)
        if refused:
            problems = self._all_texts(problem or "")
            raise UsageError(f"rank {refused[0]}: {headers[refused[0]].operation}: {problems[refused[0]]}")
        if misfit is not None:
            calls = self._all_texts(mine.describe(tensors))
            rank_0s, its = _where_they_differ(calls[0], calls[misfit])
            raise MismatchError(
                f"rank 0 calls {rank_0s}; rank {misfit} calls {its}; all ranks must call the same collectives in the "
                "same order, with tensors that fit"
            )
        return headers

    def _all_texts(self, text: str) -> list[str]:
        """Every rank's text: all ranks know that something is wrong and say what."""
        encoded = text.encode()
        lengths = self.all_gather_equal(torch.tensor([len(encoded)], device=_CPU), "explaining an error")
        padded = encoded.ljust(max(int(length) for length in lengths), b"\0")
        gathered = self.all_gather_equal(torch.frombuffer(bytearray(padded), dtype=torch.uint8), "explaining an error")
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in gathered]

    # -- messages -------------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of zeros that sums handle best. All ranks allocate the same in the same order."""
        group = self.group
        if isinstance(group, TransportGroup) and device.type == "cpu":
            return group.allocate(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    @property
    def _is_ours(self) -> bool:
        return isinstance(self.group, TransportGroup)

    @property
    def adds_16_bits_in_32(self) -> bool:
        """Whether 16-bit floats are added in 32 bits and rounded once; Gloo and NCCL round each time."""
        return self._is_ours

    def sends_at_once(self, tensor: Tensor) -> bool:
        """Whether messages to several ranks and from them may be on their way at the same time; NCCL's wait in line."""
        return self._is_ours or self._backend(tensor).name() == "gloo"

    def needs_slices(self, dtype: torch.dtype, *, in_tree: bool) -> bool:
        """Whether a sum is to be computed slice by slice, since the backend would not add well enough, or in a tree."""
        if self.has_slices:
            return False
        return in_tree or (dtype in ADDED_IN_32_BITS and not self.adds_16_bits_in_32)

    @property
    def has_slices(self) -> bool:
        """Whether the backend can do the two halves of a sum by itself."""
        group = self.group
        return isinstance(group, TransportGroup) and group.transport.has_slices

    def start_slices(self, half: str, tensor: Tensor, num_slices: int, doing: str) -> Pending:
        """ "reduce" or "gather" slices, as `renkei.communicators.slices` says, where the backend has that."""
        group = self.group
        assert isinstance(group, TransportGroup)
        return self._start(lambda: group.start_slices(half, tensor, num_slices), doing)

    def start_reduction(self, tensor: Tensor, reduction: Reduction, doing: str) -> Pending:
        """Replace `tensor` by its sum, product, max or min over ranks, in its own dtype."""
        self.check_open()
        if self.size == 1:
            return Pending([])
        backend = self._backend(tensor)
        if isinstance(backend, TransportGroup):
            return self._start(lambda: backend.start_reduction([tensor], reduction), doing)
        return self._start(lambda: backend.allreduce([tensor], _REDUCTIONS[reduction]), doing)

    def start_broadcast(self, tensor: Tensor, root: int, doing: str) -> Pending:
        """Replace `tensor` by that of `root`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start(lambda: self._backend(tensor).broadcast([tensor], options), doing)

    def start_send(self, tensor: Tensor, dest: int, tag: int, doing: str) -> Pending:
        """Send to one rank."""
        sent = tensor.cpu() if self._needs_host_memory(tensor) else tensor
        return self._start(lambda: self._backend(sent).send([sent], dest, tag), doing)

    def start_recv(self, tensor: Tensor, source: int, tag: int, doing: str) -> Pending:
        """Receive into `tensor` from one rank."""
        if not self._needs_host_memory(tensor):
            return self._start(lambda: self._backend(tensor).recv([tensor], source, tag), doing)
        received = torch.empty_like(tensor, device=_CPU)
        pending = self._start(lambda: self._backend(received).recv([received], source, tag), doing)
        return Pending([pending], afterwards=lambda: tensor.copy_(received))

    def all_gather_equal(self, tensor: Tensor, doing: str) -> list[Tensor]:
        """Every rank's tensor, which has the same shape and dtype everywhere."""
        if self.size == 1:
            return [tensor.clone()]
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        self._start(lambda: self._backend(tensor).allgather([outputs], [tensor]), doing).wait()
        return outputs

    def all_to_all_split(
        self, tensor: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], doing: str
    ) -> list[Tensor]:
        """Send `send_sizes[r]` elements of a flat tensor to each rank r, receive `recv_sizes[r]` from it."""
        output = tensor.new_empty(sum(recv_sizes))
        if self.size == 1:
            output.copy_(tensor)
        else:
            sizes = (list(recv_sizes), list(send_sizes))
            options = dist.AllToAllOptions()
            self._start(lambda: self._backend(tensor).alltoall_base(output, tensor, *sizes, options), doing).wait()
        return list(output.split(list(recv_sizes)))

    def _needs_host_memory(self, tensor: Tensor) -> bool:
        """Whether the backend would send from a GPU's addresses as if they were the host's: Gloo does, to one rank."""
        return tensor.device.type != "cpu" and self._backend(tensor).name() == "gloo"

    def _start(self, operation: Callable[[], dist.Work], doing: str) -> Pending:
        try:
            pending = Pending([operation()], rank=self.rank, doing=doing)
        except RuntimeError as error:  # some backends notice at once that a rank has gone
            raise translate(error, rank=self.rank, doing=doing) from None
        with self._guard:
            self._on_their_way.add(pending)
        return pending


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Two texts as they are, or what of them is near their first difference if they are long."""
    first = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, first - _EXCERPT // 2)

    def excerpt(text: str) -> str:
        return ("... " if begin else "") + text[begin : begin + _EXCERPT] + (" ..." if text[begin + _EXCERPT :] else "")

    return (one, other) if max(len(one), len(other)) <= _EXCERPT else (excerpt(one), excerpt(other))
