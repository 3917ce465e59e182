"""What a backend of ours has to be able to do. Everything else torch asks of a backend is made of this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from renkei.communicators.reduction import Reduction
from renkei.communicators.work_queue import Transfer


class Transport(ABC):
    """Moves and adds flat, contiguous tensors in host memory among the ranks of one group.

    All methods but `send` and `recv` are collectives: every rank calls them in the same order, with sizes that fit, and
    they return when the result is there. Each raises `PeerLostError` if a rank that is needed has gone, `DeadlineError`
    when it has waited too long, and `MismatchError`, on every rank, if ranks call what doesn't fit and it can tell.

    Attributes:
        name: as which torch and users know it.
        rank, size: this rank, and how many there are.
        timeout: seconds that it may wait for other ranks.
        takes_gpu_memory: whether tensors may be on a GPU, too.
        has_slices: whether it has `reduce_slices` and `gather_slices`.
    """

    name: str
    rank: int
    size: int
    timeout: float
    takes_gpu_memory: bool = False
    has_slices: bool = False

    @abstractmethod
    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Replace a tensor by its `Reduction` over ranks. 16-bit floats are computed in 32 bits and rounded once."""

    def begin_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Transfer | None:
        """Begin an `all_reduce` without waiting, which goes on by itself and with who waits; None where that can't be.

        Any tensor is taken, and nothing raised: what is wrong is told by `all_reduce`.
        """
        return None

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        """Fill `output` with this rank's part, of as many equal ones as there are ranks, of the reduced `tensor`."""

    @abstractmethod
    def broadcast(self, data: Tensor, root: int) -> None:
        """Replace bytes by those of `root`."""

    @abstractmethod
    def all_gather(self, output: Tensor, data: Tensor) -> None:
        """Fill `output` with the bytes of all ranks in their order; each has the same number of them."""

    @abstractmethod
    def gather(self, output: Tensor | None, data: Tensor, root: int) -> None:
        """Fill the root's `output` with the bytes of all ranks in their order; each has the same number of them."""

    @abstractmethod
    def scatter(self, output: Tensor, data: Tensor | None, root: int) -> None:
        """Fill `output` with this rank's part, of as many equal ones as there are ranks, of the root's bytes."""

    @abstractmethod
    def all_to_all(self, output: Tensor, data: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int]) -> None:
        """Send ``send_sizes[r]`` bytes of `data` to rank r, and fill `output` with ``recv_sizes[r]`` bytes from it."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come."""

    def reduce_slices(self, tensor: Tensor, num_slices: int) -> None:
        """Replace slice r of a tensor, on rank r alone, by its sum over ranks; other slices may be overwritten."""
        raise NotImplementedError

    def gather_slices(self, tensor: Tensor, num_slices: int) -> None:
        """Replace each slice of a tensor, on all ranks, by that of the rank of its number."""
        raise NotImplementedError

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros that `all_reduce` handles best; a collective."""
        return torch.zeros(numel, dtype=dtype, device="cpu")

    @abstractmethod
    def send(self, data: Tensor, dest: int, tag: int) -> Transfer:
        """Begin to send bytes to one rank."""

    @abstractmethod
    def recv(self, data: Tensor, source: int | None, tag: int) -> Transfer:
        """Begin to receive bytes from one rank, or from any."""

    def interrupt(self) -> None:  # noqa: B027 -- there may be nothing that can be done
        """Let what is waiting here for other ranks end with an error soon, if that can be; called before `close`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all connections; other ranks that wait for this one get an error soon."""
