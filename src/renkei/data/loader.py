"""The source of a training loop's batches: this rank's share of each global batch, on its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from renkei.communicators.communicator import Communicator
from renkei.data.by_batch import ByBatch, Collate
from renkei.data.scatter import ScatteredDataset
from renkei.data.sharding import Dealer, Indices, Share
from renkei.data.streams import batch_seed, seed_default_generators
from renkei.errors import MismatchError, UsageError
from renkei.nested import map_tensors


class DataLoader:
    """Iterates over an epoch; iterating again, over the next one.

    The global batch is the contract: batch k has the same samples whatever the number of ranks, and this rank gets
    its slice. Slices differ by at most one sample and may be empty (an empty batch has tensors of length 0). Nothing
    is dropped: the last batch of an epoch may be smaller. Making a loader is a collective operation.

    Args:
        dataset: what `scatter_dataset` returned, or a dataset, dealt in its own order unless `shuffle`.
        comm: the ranks.
        global_batch_size: samples in a batch, over all ranks.
        shuffle, seed: for a dataset that isn't scattered; by default False and 0.
        collate_fn: makes a batch of a list of samples; by default the dataset's ``batch`` or torch's own way.
        num_workers, worker_init_fn, prefetch_factor, multiprocessing_context, timeout: for
            `torch.utils.data.DataLoader`. Workers' default random generators are seeded for each batch.
        pin_memory: whether batches pass through pinned memory; by default where the rank computes on a GPU.

    Attributes:
        samples: how many samples have been given to all ranks together since the first epoch began. It is all the
            state there is.
        share: how the batch that is out was cut; None between epochs.

    Raises:
        MismatchError: ranks make different loaders.
        UsageError: there is nothing to load.
    """

    def __init__(
        self,
        dataset: Any,
        comm: Communicator,
        *,
        global_batch_size: int,
        shuffle: bool | None = None,
        seed: int | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0.0,
        pin_memory: bool | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError("an IterableDataset can't be dealt by index; use one with __getitem__ and __len__")
        if not hasattr(global_batch_size, "__index__") or global_batch_size < 1:
            raise UsageError(f"global_batch_size is {global_batch_size!r}, but must be a whole number, at least 1")
        fixed, example = False, 0
        if isinstance(dataset, ScatteredDataset):
            if shuffle is not None or seed is not None:
                raise UsageError("shuffle and seed go to scatter_dataset, not to the loader of what that returned")
            if dataset.fixed and len(dataset):
                example = int(dataset.indices[0])  # the others' samples may lie on other nodes
            shuffle, seed, fixed, dataset = dataset.shuffle, dataset.seed, dataset.fixed, dataset.dataset
        if len(dataset) == 0:
            raise UsageError("the dataset is empty")
        self.comm = comm
        self.dealer = Dealer(
            num_examples=len(dataset),
            global_batch_size=int(global_batch_size),
            num_ranks=comm.size,
            shuffle=bool(shuffle),
            seed=seed or 0,
            fixed=fixed,
        )
        _check_alike(comm, self.dealer)
        self.samples = 0
        self.share: Share | None = None
        self._by_batch = ByBatch(dataset, collate_fn, example=example)
        self._options = {
            "num_workers": num_workers,
            "worker_init_fn": worker_init_fn,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "pin_memory": comm.device.type == "cuda" if pin_memory is None else pin_memory,
        }
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
        first = start // self.dealer.global_batch_size
        for at, batch in enumerate(self._load(epoch, start), first):
            self.share = self.dealer.share(at)
            self.samples += sum(self.share.sizes)
            self.comm.shares[self] = self.share
            try:
                yield map_tensors(self._to_device, batch)
            finally:
                self.comm.shares.pop(self, None)
                self.share = None

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
        rank, seed = self.comm.rank, self.dealer.seed
        batches = enumerate(self.dealer.deal(rank, epoch, start), start // self.dealer.global_batch_size)
        return iter(
            TorchLoader(
                _SeededBatches(self._by_batch, seed=seed, rank=rank, epoch=epoch),
                sampler=batches,
                batch_size=None,
                generator=torch.Generator().manual_seed(0),  # else numbers are drawn from the model's
                **self._options,
            )
        )

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.comm.device, non_blocking=True)


class _SeededBatches(Dataset[Any]):
    """The batches of an epoch by number and indices; a worker makes each with random numbers of its own."""

    def __init__(self, by_batch: ByBatch, *, seed: int, rank: int, epoch: int) -> None:
        self._by_batch, self._seed, self._rank, self._epoch = by_batch, seed, rank, epoch

    def __getitem__(self, at: tuple[int, Indices]) -> Any:
        number, indices = at
        if get_worker_info() is not None:  # in this process, the model's own generators would be seeded
            seed_default_generators(batch_seed(self._seed, rank=self._rank, epoch=self._epoch, batch=number))
        return self._by_batch[indices]


def _check_alike(comm: Communicator, dealer: Dealer) -> None:
    for rank, its in enumerate(dealers := comm.all_gather_object(dealer)):
        for name in (field.name for field in fields(dealer)):
            found, expected = getattr(its, name), getattr(dealers[0], name)
            if found != expected:
                raise MismatchError(
                    f"rank {rank} has made a loader with {name}={found} where rank 0 has {name}={expected}; make the "
                    "same one on every rank"
                )
