"""Datasets that ranks share by index: nothing is pickled or sent but a seed."""

from __future__ import annotations

import secrets
from typing import Any

from torch.utils.data import Dataset

from renkei.communicators.communicator import Communicator
from renkei.data.sharding import Dealer, Indices, shard_range
from renkei.errors import MismatchError, UsageError


class ScatteredDataset(Dataset[Any]):
    """A dataset and how it is dealt to ranks.

    Given to `renkei.DataLoader` it is dealt anew each epoch. Indexed, it is this rank's part of it in the first
    epoch's order, and `len` is the length of that part.

    Attributes:
        dataset: all of it.
        shuffle, seed, fixed: see `Dealer`.
        indices: this rank's part.
    """

    def __init__(self, dataset: Any, *, rank: int, size: int, shuffle: bool, seed: int, fixed: bool) -> None:
        self.dataset, self.shuffle, self.seed, self.fixed = dataset, shuffle, seed, fixed
        everything = Dealer(
            num_examples=len(dataset),
            global_batch_size=len(dataset),
            num_ranks=size,
            shuffle=shuffle,
            seed=seed,
            fixed=fixed,
        )
        self.indices: Indices = next(everything.deal(rank, epoch=0))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int) -> Any:
        return self.dataset[int(self.indices[at])]


def scatter_dataset(
    dataset: Any,
    comm: Communicator,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    *,
    fixed: bool = False,
    broadcast: bool = False,
) -> ScatteredDataset:
    """Deal a dataset to the ranks of `comm`: each gets its own samples, none is left out, none is given twice.

    Every rank passes a dataset with the same samples in the same order, from which it will read its own.

    Args:
        root: whose seed counts.
        shuffle: deal in random order, another one each epoch.
        seed: of the order; chosen at random by `root` if None.
        fixed: let each rank keep the same samples in all epochs, as ChainerMN did, for data that lies where the rank
            runs. The order then depends on the number of ranks.
        broadcast: the dataset exists on `root` alone and is pickled and sent whole.

    Raises:
        MismatchError: ranks have datasets of different lengths.
        UsageError: a rank has none, or it is empty.
    """
    if broadcast:
        dataset = comm.broadcast_object(dataset, root)
    ways = comm.all_gather_object((None if dataset is None else len(dataset), shuffle, fixed))
    lengths = [length for length, _, _ in ways]
    if None in lengths:
        raise UsageError(
            f"rank {lengths.index(None)} has no dataset; pass it on every rank, or broadcast=True to send it from "
            f"rank {root}"
        )
    if len(set(lengths)) > 1:
        listing = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        raise MismatchError(f"ranks have datasets of different lengths ({listing}); give all the same samples")
    if len(set(ways)) > 1:
        raise MismatchError("ranks give scatter_dataset different values of shuffle or fixed; give the same on all")
    if lengths[0] == 0:
        raise UsageError("the dataset is empty")
    seed = comm.broadcast_object(secrets.randbits(31) if seed is None else seed, root)
    return ScatteredDataset(dataset, rank=comm.rank, size=comm.size, shuffle=shuffle, seed=seed, fixed=fixed)


def scatter_index(
    num_examples: int, comm: Communicator, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """The first index this rank owns of `num_examples`, and the one after the last. No message is sent.

    With `force_equal_length` all ranks get equally many, a few indices twice; without, none twice (exact evaluation).
    `root` is there for ChainerMN's sake.
    """
    own = shard_range(num_examples, rank=comm.rank, size=comm.size, equal=force_equal_length)
    return own.start, own.stop
