"""Means over samples that are the same whatever the number of ranks: sums and weights travel, never means."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError

# From a batch's output and target, a vector of one value for each sample.
Metric = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Each sample's cross entropy, in nats."""
    return nn.functional.cross_entropy(output, target, reduction="none")


def top1(output: Tensor, target: Tensor) -> Tensor:
    """1 for each sample whose highest score is its class's, else 0."""
    return (output.argmax(dim=1) == target).to(output.dtype)


METRICS: dict[str, Metric] = {"loss": cross_entropy, "top1": top1}  # a classifier's


class WeightedMeans:
    """Means of several quantities over the samples seen since the last `reset`, on this rank and on all."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._sums: Tensor | None = None

    @torch.no_grad()
    def update(self, output: Tensor, target: Tensor) -> None:
        """Count a batch. Nothing waits for a GPU to finish."""
        more = sums(self._metrics, output, target)
        self._sums = more if self._sums is None else self._sums + more

    def over_all_ranks(self, comm: Communicator) -> dict[str, float]:
        """The means over the samples of all ranks; NaN if there were none. A collective operation."""
        none = torch.zeros(len(self._metrics) + 1, dtype=torch.float64, device=comm.device)
        return as_means(self._metrics, comm.all_reduce(none if self._sums is None else self._sums))


def sums(metrics: Mapping[str, Metric], output: Tensor, target: Tensor) -> Tensor:
    """For a batch, each metric's sum over samples in fp64, and at the end the number of samples; where they lie."""
    totals = output.new_full((len(metrics) + 1,), len(target), dtype=torch.float64)
    for at, (name, metric) in enumerate(metrics.items()):
        values = metric(output, target)
        if values.shape != (len(target),):
            raise UsageError(
                f"metric {name!r} gives a tensor of shape {list(values.shape)} for {len(target)} samples, but must "
                "give one value for each of them (reduction='none'), for means of batches don't add up"
            )
        totals[at] = values.double().sum()
    return totals


def as_means(metrics: Mapping[str, Metric], total: Tensor) -> dict[str, float]:
    """The means that added `sums` stand for."""
    return dict(zip(metrics, (total[:-1] / total[-1]).tolist(), strict=True))
