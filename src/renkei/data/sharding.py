"""Which rank gets which sample: arithmetic on indices, the same on every rank, and no messages.

Batch k of an epoch is a slice of the epoch's permutation and each rank takes a slice of the batch, so what is
trained on does not depend on how many ranks there are, and the position in the data is one integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """How a global batch is cut.

    Attributes:
        sizes: samples by rank.
        uneven: fewest and most samples of a rank in the epoch's first batch in which they differ; None without any.
    """

    sizes: tuple[int, ...]
    uneven: tuple[int, int] | None


def shard_range(num_examples: int, *, rank: int, size: int, equal: bool = False) -> range:
    """The range of `num_examples` that `rank` owns.

    By default no index is owned twice and sizes differ by at most one, the first ranks having more. With `equal`, each
    rank gets ceil(n / size) and neighbours share some: what ChainerMN's ``force_equal_length`` did.
    """
    if equal:
        length = -(-num_examples // size)
        begin = num_examples * rank // size
        return range(begin, begin + length)
    length, longer = divmod(num_examples, size)
    begin = rank * length + min(rank, longer)
    return range(begin, begin + length + (rank < longer))


def permutation(num_examples: int, *, seed: int, epoch: int) -> Indices:
    """The order of an epoch's samples."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_examples)


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """Deals a dataset to ranks in global batches.

    Attributes:
        num_examples: samples in the dataset, at least one.
        global_batch_size: samples in a batch, over all ranks; the last batch of an epoch may have fewer.
        num_ranks: how many ranks there are; any of them may get nothing of a small batch.
        shuffle: whether each epoch has an order of its own.
        seed: of these orders.
        fixed: each rank keeps to its own samples in every epoch (those at positions rank, rank + num_ranks, ... of
            epoch 0's order), for data that lies where the rank runs. What is trained on then depends on num_ranks.
    """

    num_examples: int
    global_batch_size: int
    num_ranks: int
    shuffle: bool = False
    seed: int = 0
    fixed: bool = False

    @property
    def batches_per_epoch(self) -> int:
        """How many batches an epoch has."""
        return -(-self.num_examples // self.global_batch_size)

    def share(self, batch: int) -> Share:
        """How a batch is cut."""
        begin = batch * self.global_batch_size
        numel = min(self.global_batch_size, self.num_examples - begin)
        sizes = tuple(len(self._positions(begin, numel, rank)) for rank in range(self.num_ranks))
        num_full, last = divmod(self.num_examples, self.global_batch_size)
        batches = [self.global_batch_size, last] if num_full else [last]
        uneven = [(each // self.num_ranks, each // self.num_ranks + 1) for each in batches if each % self.num_ranks]
        return Share(sizes, next(iter(uneven), None))

    def order(self, epoch: int) -> Indices:
        """The samples in the order in which an epoch's batches are cut from it."""
        if not self.shuffle:
            return np.arange(self.num_examples)
        if not self.fixed:
            return permutation(self.num_examples, seed=self.seed, epoch=epoch)
        order = permutation(self.num_examples, seed=self.seed, epoch=0)
        for rank in range(self.num_ranks):
            own = order[rank :: self.num_ranks]
            own[:] = own[permutation(len(own), seed=self.seed, epoch=epoch)]
        return order

    def deal(self, rank: int, epoch: int, start: int = 0) -> Iterator[Indices]:
        """The samples of `rank` in each batch of an epoch, from the epoch's sample `start` on."""
        order = self.order(epoch)
        for begin in range(start, self.num_examples, self.global_batch_size):
            numel = min(self.global_batch_size, self.num_examples - begin)
            yield order[self._positions(begin, numel, rank)]

    def _positions(self, begin: int, numel: int, rank: int) -> range:
        """Where in an epoch's order the samples of `rank` stand that are in the batch from `begin` on."""
        if self.fixed:
            first = begin + (rank - begin) % self.num_ranks
            return range(first, begin + numel, self.num_ranks)
        own = shard_range(numel, rank=rank, size=self.num_ranks)
        return range(begin + own.start, begin + own.stop)
