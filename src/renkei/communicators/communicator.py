"""The communicator: who talks to whom, and the one thing its algorithms differ in, the sum of a flat buffer."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators import collectives, objects, point_to_point
from renkei.communicators.barrier import Barrier
from renkei.communicators.channel import Pending
from renkei.communicators.groups import check_made_alike, check_one_rank_per_gpu, device_identity
from renkei.communicators.network import Network, connect_anew
from renkei.communicators.options import Options
from renkei.communicators.sum_by_slices import SumBySlices
from renkei.data.sharding import Share
from renkei.errors import UsageError
from renkei.gradients.buckets import BucketSizes
from renkei.gradients.compression.codec import Codec
from renkei.gradients.compression.wire import give_along
from renkei.topology import Topology


class Communicator(ABC):
    """A group of ranks and a way to add their tensors.

    Every rank must call the same collectives in the same order; where they don't, and where tensors don't fit, every
    rank gets the same `MismatchError`. A wait for a rank that has ended raises `PeerLostError`, and no wait lasts
    longer than the communicator's timeout (`DeadlineError`). Arguments are never changed. Use as a context manager,
    or `close` it.

    Args:
        store: where the ranks find one another; used by this communicator alone.
        rank: this rank's number.
        nodes: by rank, something that tells its node.
        options: the rest.

    Attributes:
        topology: where this rank stands.
        options: as given.
        shares: by `renkei.DataLoader`, how it cut the batch that is out.
    """

    name: str

    def __init__(self, store: dist.Store, *, rank: int, nodes: Sequence[Hashable], options: Options) -> None:
        store = connect_anew(store, rank)
        self.topology = Topology.from_nodes(rank, nodes)
        self.options = options
        self.shares: dict[object, Share] = {}
        self._network = Network(store, rank, tuple(nodes), options)
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._num_descendants = 0
        self._by_slices: SumBySlices | None = None
        self._channel = self._network.open("all")
        self._barrier = Barrier(store, rank=rank, size=len(nodes))
        self._barrier.wait(options.timeout)  # so that none ends, and closes connections, while another is connecting
        self._check_alike()

    def _check_alike(self) -> None:
        """Raise on every rank if some would talk in another way than others, or over the same GPU with NCCL."""
        mine = f"{self.name}/{self.options.backends} on {self.device.type}"
        everyone = self.all_gather_object((mine, device_identity(self.device)))
        check_made_alike([its for its, _ in everyone])
        if self.options.backend == "nccl":
            check_one_rank_per_gpu([identity for _, identity in everyone])

    # -- the hole each algorithm fills ----------------------------------------------------------------------------

    @abstractmethod
    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """Begin to replace a flat buffer by its sum over ranks; `pieces` are views of the tensors it consists of.

        Not preceded by a header: who calls this has compared its plan with the other ranks' once.
        """

    def start_coded_sum(self, buffer: Tensor, codec: Codec, owed: Tensor | None) -> Pending:
        """Begin to replace a flat fp32 buffer by its sum over ranks, the same on all, of which fewer bytes travel.

        Args:
            codec: how values travel where a network does the carrying.
            owed: fp32, as long as the buffer: is added to it, and becomes what this rank's messages lost. So the sum,
                and what all ranks owe then, are together what they gave and owed. None keeps no account.
        """
        self._channel.check_open()
        give_along(owed, buffer)
        return self._start_coded_sum(buffer, codec, owed) if self.num_addends > 1 else Pending([])

    def start_sums(self, run: Callable[[Callable[[Tensor], None]], None], device: torch.device) -> Pending:
        """Begin what takes several sums, one after the other, beside what the caller does.

        Args:
            run: is given what replaces a flat buffer on such a device by its sum over ranks.
        """
        self._channel.check_open()
        return self._sums_by_slices().start_several(run, device)

    def prepare_compressed_sums(self) -> None:
        """Connect for `start_coded_sum` and `start_sums`, which else do that the first time; a collective operation."""
        if self.num_addends > 1:
            self._sums_by_slices()

    def _start_coded_sum(self, buffer: Tensor, codec: Codec, owed: Tensor | None) -> Pending:
        """The same, where `owed` is zero and becomes what is lost."""
        return self._sums_by_slices().start_coded(buffer, codec, owed, "coded gradient bucket")

    @property
    def num_addends(self) -> int:
        """How many ranks' buffers `start_sum` adds: all of them, but for an instrument that doesn't."""
        return self.size

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros that `start_sum` handles best."""
        return self._channel.allocate(numel, dtype, device)

    def _start_sum_of(self, tensor: Tensor, doing: str) -> Pending:
        """Begin to replace one tensor by its sum over all ranks, as the backend does it, or slice by slice."""
        if self.size == 1 or not self._channel.needs_slices(
            tensor.dtype, in_tree=self.options.virtual_ranks is not None
        ):
            return self._channel.start_reduction(tensor, "sum", doing)
        return self._sums_by_slices().start(tensor, doing)

    def _sums_by_slices(self) -> SumBySlices:
        if self._by_slices is None:
            self._by_slices = SumBySlices(self._network.open("slices"), self.options.timeout)
        return self._by_slices

    # -- who am I -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank among all."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.topology.size

    @property
    def intra_rank(self) -> int:
        """This rank among those of its node."""
        return self.topology.intra_rank

    @property
    def intra_size(self) -> int:
        """How many ranks this node has."""
        return self.topology.intra_size

    @property
    def inter_rank(self) -> int:
        """The number of this node."""
        return self.topology.inter_rank

    @property
    def inter_size(self) -> int:
        """How many nodes there are."""
        return self.topology.inter_size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.options.device

    @property
    def nodes(self) -> tuple[Hashable, ...]:
        """By rank, something that tells its node."""
        return self._network.nodes

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for what of torch.distributed takes one (DDP does)."""
        return self._channel.group

    @property
    def store(self) -> dist.Store:
        """A key-value store of these ranks, for what of torch.distributed takes one."""
        return dist.PrefixStore("user", self._network.store)

    @property
    def bucket_sizes(self) -> BucketSizes:
        """How gradients are cut into messages."""
        return self.options.sizes_of_buckets(self.inter_size)

    def __repr__(self) -> str:
        return f"<{self.name}/{self.options.backends} rank {self.rank} of {self.size} on {self.device}>"

    # -- tensors --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """The sum (or "mean", "product", "max", "min") of the ranks' tensors, on every rank.

        All have the same shape and dtype. 16-bit floats are added in 32 bits; bool counts as or.
        """
        return collectives.all_reduce(self._channel, tensor, reduction)

    def reduce_scatter(self, tensors: Sequence[Tensor], reduction: str = "sum") -> Tensor:
        """The sum or mean over ranks of their ``tensors[self.rank]``, added in the order of ranks.

        The tensor for one rank has the same shape on all; those for different ranks may differ.
        """
        return collectives.reduce_scatter(self._channel, tensors, reduction)

    def broadcast(self, tensor: Tensor | None, root: int = 0) -> Tensor:
        """The tensor of `root`, on every rank; what the other ranks pass is not looked at."""
        return collectives.broadcast(self._channel, tensor, root, self.device)

    def broadcast_into(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Give these tensors, whatever their shapes and dtypes, the values they have on `root`."""
        collectives.broadcast_into(self._channel, tensors, root)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The tensors of all ranks, on every rank; shapes may differ, dtypes not."""
        return collectives.all_gather(self._channel, tensor)

    def gather(self, tensor: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """The tensors of all ranks on `root`, None elsewhere; shapes may differ, dtypes not."""
        return collectives.gather(self._channel, tensor, root)

    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        """The ``tensors[self.rank]`` of `root`; shapes may differ; what other ranks pass is not looked at."""
        return collectives.scatter(self._channel, tensors, root, self.device)

    def all_to_all(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From each rank its ``tensors[self.rank]``; shapes may differ for each pair, dtypes not."""
        return collectives.all_to_all(self._channel, tensors)

    def send(self, data: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Send one tensor, or several of any shapes and dtypes, to a rank that calls `recv`."""
        point_to_point.send(self._channel, data, dest, tag, self.device)

    def recv(self, source: int, tag: int = 0) -> Tensor | tuple[Tensor, ...]:
        """What `source` sends: a tensor, or a tuple if it sent a sequence."""
        return point_to_point.recv(self._channel, source, tag, self.device)

    # -- objects --------------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """The picklable object of `root`, on every rank."""
        return objects.broadcast_object(self._channel, obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks, on every rank."""
        return objects.all_gather_object(self._channel, obj)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks on `root`, None elsewhere."""
        return objects.gather_object(self._channel, obj, root)

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """The ``objs[self.rank]`` of `root`."""
        return objects.scatter_object(self._channel, objs, root)

    def all_reduce_object(self, obj: Any, reduction: Callable[[Any, Any], Any] = operator.add) -> Any:
        """The objects of all ranks combined in the order of ranks, on every rank."""
        first, *rest = self.all_gather_object(obj)
        for each in rest:
            first = reduction(first, each)
        return first

    def send_object(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to a rank that calls `recv_object`."""
        objects.send_object(self._channel, obj, dest, tag)

    def recv_object(self, source: int, tag: int = 0) -> Any:
        """The object `source` sends."""
        return objects.recv_object(self._channel, source, tag)

    # -- groups ---------------------------------------------------------------------------------------------------

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank has come; after `timeout` seconds every rank raises and names those missing."""
        self._channel.check_open()
        self._barrier.wait(self.options.timeout if timeout is None else timeout)

    def split(self, color: int | None, key: int | None = None) -> Self | None:
        """A communicator of the ranks that give the same `color`, ordered by `key` (else by rank).

        It has this one's algorithm and options. A rank that gives None gets None.
        """
        key = self.rank if key is None else key
        everyone = self.all_gather_object((color, key))
        self._num_descendants += 1
        if color is None:
            return None
        members = sorted((its_key, rank) for rank, (its_color, its_key) in enumerate(everyone) if its_color == color)
        ranks = [rank for _, rank in members]
        store = dist.PrefixStore(f"split/{self._num_descendants}/{color}", self._network.store)
        return self._descend(store, ranks)

    def duplicate(self, **changes: Any) -> Self:
        """A communicator of the same ranks whose messages never meet this one's; `changes` replace options."""
        self._channel.check_open()
        self._num_descendants += 1
        store = dist.PrefixStore(f"duplicate/{self._num_descendants}", self._network.store)
        return self._descend(store, range(self.size), **changes)

    def _descend(self, store: dist.Store, ranks: Sequence[int], **changes: Any) -> Self:
        child = type(self)(
            store,
            rank=list(ranks).index(self.rank),
            nodes=[self._network.nodes[rank] for rank in ranks],
            options=replace(self.options, **changes),
        )
        self._children.add(child)
        return child

    # -- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop the connections, and those of all communicators made from this one. Calling it again does nothing.

        Not a collective: ranks that still wait for this one get `PeerLostError`.
        """
        for child in list(self._children):
            child.close()
        self._network.close()
        if self._by_slices is not None:
            self._by_slices.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # who copies a model or an optimizer does not want another network

    def __reduce__(self) -> str:
        raise UsageError("a communicator can't be pickled: it is a set of connections; create one in each process")
