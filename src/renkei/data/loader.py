"""The source of a training loop's batches: this rank's share of each global batch, on its device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from renkei.communicators.communicator import Communicator
from renkei.data.by_batch import ByBatch, Collate
from renkei.data.scatter import ScatteredDataset
from renkei.data.sharding import Dealer, Indices
from renkei.data.streams import rank_seed, seed_default_generators
from renkei.errors import UsageError
from renkei.nested import map_tensors


class DataLoader:
    """Iterates over an epoch; iterating again, over the next one.

    The global batch is the contract: batch k has the same samples whatever the number of ranks, and this rank gets
    its slice. Slices differ by at most one sample and may be empty (an empty batch has tensors of length 0). Nothing
    is dropped: the last batch of an epoch may be smaller. How a batch was cut is in ``comm.share`` while it is out.

    Args:
        dataset: what `scatter_dataset` returned, or a dataset, dealt in its own order unless `shuffle`.
        comm: the ranks.
        global_batch_size: samples in a batch, over all ranks.
        shuffle, seed: for a dataset that isn't scattered.
        collate_fn: makes a batch of a list of samples; by default the dataset's ``batch`` or torch's own way.
        num_workers, options: for `torch.utils.data.DataLoader`.

    Attributes:
        samples: how many samples have been given to all ranks together since the first epoch began. It is all the
            state there is.
    """

    def __init__(
        self,
        dataset: Any,
        comm: Communicator,
        *,
        global_batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError("an IterableDataset can't be dealt by index; use one with __getitem__ and __len__")
        if global_batch_size < 1:
            raise UsageError(f"global_batch_size is {global_batch_size}, but must be at least 1")
        fixed = False
        if isinstance(dataset, ScatteredDataset):
            shuffle, seed, fixed, dataset = dataset.shuffle, dataset.seed, dataset.fixed, dataset.dataset
        if len(dataset) == 0:
            raise UsageError("the dataset is empty")
        self.comm = comm
        self.dealer = Dealer(
            num_examples=len(dataset),
            global_batch_size=global_batch_size,
            num_ranks=comm.size,
            shuffle=shuffle,
            seed=seed,
            fixed=fixed,
        )
        self.samples = 0
        self._dataset = ByBatch(dataset, collate_fn)
        self._num_workers, self._options = num_workers, options
        self._continues = False
        if comm.rank == 0 and comm.size > 1:
            print(f"renkei: {self.describe()}", file=sys.stderr, flush=True)

    def __len__(self) -> int:
        """Batches per epoch."""
        return self.dealer.batches_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch that iterating is in, or will begin."""
        return self.samples // self.dealer.num_examples

    def describe(self) -> str:
        """How a global batch is cut, in a line."""
        dealer = self.dealer
        sizes = dealer.share(0).sizes
        cut = f"{sizes[0]}" if len(set(sizes)) == 1 else f"{min(sizes)} or {max(sizes)}"
        last = dealer.num_examples % dealer.global_batch_size
        remainder = f", the last of {last}" if last else ""
        return (
            f"global batch {sum(sizes)} = {cut} on each of {dealer.num_ranks} ranks; "
            f"{len(self)} batches an epoch{remainder}"
        )

    def __iter__(self) -> Iterator[Any]:
        num_examples = self.dealer.num_examples
        if not self._continues:  # an epoch that was left early is not gone on with
            self.samples = -(-self.samples // num_examples) * num_examples
        self._continues = False
        epoch, start = divmod(self.samples, num_examples)
        for at, batch in enumerate(self._load(epoch, start), start // self.dealer.global_batch_size):
            share = self.dealer.share(at)
            self.comm.share = share
            self.samples += sum(share.sizes)
            yield map_tensors(self._to_device, batch)

    def state_dict(self) -> dict[str, int]:
        """The position: the same on every rank, and for any number of ranks."""
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on, at the next iteration, where a loader with this state would have.

        Raises:
            UsageError: no batch begins there, for the dataset or the global batch size is another than it was.
        """
        position = state_dict["samples"] % self.dealer.num_examples
        if position % self.dealer.global_batch_size:
            raise UsageError(
                f"the saved position is sample {position} of an epoch of {self.dealer.num_examples}, where no batch of "
                f"{self.dealer.global_batch_size} begins; use the dataset and the global batch size it was saved with"
            )
        self.samples = state_dict["samples"]
        self._continues = True

    def _load(self, epoch: int, start: int) -> Iterator[Any]:
        rank = self.comm.rank
        generator = torch.Generator().manual_seed(rank_seed(self.dealer.seed, rank=rank, epoch=epoch))
        return iter(
            TorchLoader(
                self._dataset,
                sampler=_Batches(self.dealer, rank, epoch, start),
                batch_size=None,
                num_workers=self._num_workers,
                generator=generator,
                worker_init_fn=partial(_seed_worker, self.dealer.seed, rank, epoch),
                pin_memory=self.comm.device.type == "cuda",
                **self._options,
            )
        )

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.comm.device, non_blocking=True)


class _Batches:
    """A sampler whose samples are batches of indices."""

    def __init__(self, dealer: Dealer, rank: int, epoch: int, start: int) -> None:
        self._place = (rank, epoch, start)
        self._dealer = dealer

    def __iter__(self) -> Iterator[Indices]:
        return self._dealer.deal(*self._place)

    def __len__(self) -> int:
        return self._dealer.batches_per_epoch


def _seed_worker(seed: int, rank: int, epoch: int, worker: int) -> None:
    seed_default_generators(rank_seed(seed, rank=rank, worker=worker + 1, epoch=epoch))
