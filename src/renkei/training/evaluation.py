"""Exact evaluation: every sample once, and the same bits on any number of ranks (at equal threads per rank).

The data is cut into batches of a fixed size, which are dealt whole, so each is computed alike wherever it is
computed; what is added is added in the order of batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from renkei.communicators.collectives import as_bytes
from renkei.communicators.communicator import Communicator
from renkei.data.by_batch import ByBatch
from renkei.data.scatter import ScatteredDataset
from renkei.errors import MismatchError, UsageError
from renkei.training.metrics import Metric, as_means, sums


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Any, comm: Communicator, *, batch_size: int, metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Each metric's mean over a dataset of (input, target) pairs, on every rank.

    Args:
        model: must be alike on all ranks; for its batch-norm statistics, call `pool_batch_norm` before.
        dataset: all of it, the same on every rank (or what `scatter_dataset` made of it).
        batch_size: samples the model gets at once; the last bits of the result depend on it, not on the ranks.
        metrics: each a function of a batch's output and target that gives one value for each of its samples.

    Raises:
        MismatchError: ranks have different models, datasets of different lengths, or give different batch sizes.
        UsageError: the dataset is empty, or a metric gives something else than a value for each sample.
    """
    rows = [torch.zeros(0, len(metrics) + 1, dtype=torch.float64, device=comm.device)]
    with _evaluating(model):
        for inputs, target, _ in _own_batches(model, dataset, comm, batch_size):
            rows.append(sums(metrics, model(inputs), target).unsqueeze(0))
    return as_means(metrics, _in_order_of_batches(comm.all_gather(torch.cat(rows))).sum(dim=0))


@torch.no_grad()
def predict(model: nn.Module, dataset: Any, comm: Communicator, *, batch_size: int) -> Tensor:
    """The model's output for every sample, in the order of the dataset, on every rank.

    For metrics that no mean of per-sample values gives (average precision, BLEU, AUC). Arguments as for `evaluate`.
    """
    outputs, ids = [], [np.zeros(0, np.int64)]
    with _evaluating(model):
        for inputs, _, indices in _own_batches(model, dataset, comm, batch_size):
            outputs.append(model(inputs))
            ids.append(indices)
    none = comm.broadcast(outputs[0][:0] if outputs else None)  # rank 0 has the first batch; others may have nothing
    return gather_by_sample(comm, torch.from_numpy(np.concatenate(ids)), torch.cat([none, *outputs]))


def gather_by_sample(comm: Communicator, ids: Tensor, values: Tensor) -> Tensor:
    """All ranks' values, ordered by sample number, on every rank.

    Args:
        ids: which samples this rank's values belong to.
        values: one row for each of them.

    Raises:
        UsageError: a sample was given twice or left out, or a rank has not one value for each; on every rank.
    """
    ids_by_rank, values_by_rank = comm.all_gather(ids), comm.all_gather(values)
    for rank, (its_ids, its_values) in enumerate(zip(ids_by_rank, values_by_rank, strict=True)):
        if len(its_ids) != len(its_values):
            raise UsageError(f"rank {rank} gives {len(its_ids)} sample numbers but {len(its_values)} values")
    all_ids, all_values = torch.cat(ids_by_rank).cpu(), torch.cat(values_by_rank)
    order = torch.argsort(all_ids)
    if not torch.equal(all_ids[order], torch.arange(len(all_ids))):
        raise UsageError("gather_by_sample needs each sample from 0 on exactly once, over all ranks")
    return all_values[order.to(all_values.device)]


def _own_batches(
    model: nn.Module, dataset: Any, comm: Communicator, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """Every `comm.size`-th batch of inputs and targets, and which samples they are."""
    if isinstance(dataset, ScatteredDataset):
        dataset = dataset.dataset  # here it is dealt in whole batches
    cuts = comm.all_gather_object((len(dataset), batch_size))
    if len(set(cuts)) > 1:
        listing = ", ".join(f"rank {rank}: {length} in batches of {size}" for rank, (length, size) in enumerate(cuts))
        raise MismatchError(f"ranks evaluate on different samples ({listing}); give all of them to every rank")
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, but must be at least 1")
    if len(dataset) == 0:
        raise UsageError("the dataset to evaluate on is empty")
    _check_alike(model, comm)
    by_batch = ByBatch(dataset)
    for begin in range(comm.rank * batch_size, len(dataset), comm.size * batch_size):
        indices = np.arange(begin, min(begin + batch_size, len(dataset)))
        inputs, target = by_batch[indices]
        yield inputs.to(comm.device), target.to(comm.device), indices


def _check_alike(model: nn.Module, comm: Communicator) -> None:
    """Raise on every rank if ranks would evaluate different models, as batch-norm statistics make of one."""
    if comm.size == 1:
        return
    everyone = comm.all_gather_object({name: _digest(value) for name, value in model.state_dict().items()})
    for rank, digests in enumerate(everyone):
        for name in everyone[0]:
            if digests.get(name) != everyone[0][name]:
                raise MismatchError(
                    f"rank {rank} has another value of {name} than rank 0, so ranks would evaluate different models; "
                    "for batch-norm statistics, call renkei.pool_batch_norm(model, comm, num_samples) before"
                )


def _digest(value: Any) -> str | None:
    """None for what no output hangs on: counters, and what is no tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return hashlib.blake2b(as_bytes(value.cpu()).numpy().data, digest_size=16).hexdigest()


def _in_order_of_batches(rows: tuple[Tensor, ...]) -> Tensor:
    """Row r of the result is row r // n of rank r % n."""
    order = [(at, rank) for rank, own in enumerate(rows) for at in range(len(own))]
    return torch.stack([rows[rank][at] for at, rank in sorted(order)])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = {module: module.training for module in model.modules()}  # a part may be frozen in evaluation mode
    model.eval()
    try:
        yield
    finally:
        for module, mode in was_training.items():
            module.training = mode
