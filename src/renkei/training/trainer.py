"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from renkei.data.loader import DataLoader
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.optim.schedules import Schedule
from renkei.training.batch_norm_statistics import pool_batch_norm
from renkei.training.metrics import METRICS, WeightedMeans
from renkei.training.times import Stopwatch, over_ranks


@dataclass(frozen=True)
class Progress:
    """How far training is.

    Attributes:
        epoch: fractional, counted in samples.
        step: optimizer steps taken.
        learning_rate: of the latest step.
        means: of what is measured, over the samples of all ranks since the last progress was made known.
        samples_per_second: of all ranks together, since training began.
        step_ms: where the time of each step since then went on this rank, in milliseconds, by part of
            `renkei.training.times.PARTS`.
        shares: by part, its share of the time of all ranks.
    """

    epoch: float
    step: int
    learning_rate: float
    means: dict[str, float]
    samples_per_second: float
    step_ms: dict[str, list[float]]
    shares: dict[str, float]


class Trainer:
    """Trains a classifier, and says how it goes.

    Args:
        model: maps a batch of inputs to class scores; on the communicator's device.
        optimizer: of its parameters.
        loader: of (inputs, target) batches.
        loss: a mean over the samples of a batch.
        schedule: the learning rate.
        micro_batch_size: a rank's part of a batch is computed in pieces of at most this many samples; None for whole.
        report: called on every rank, every `report_every` steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MultiNodeOptimizer,
        loader: DataLoader,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: Schedule,
        micro_batch_size: int | None = None,
        report: Callable[[Progress], None] = lambda progress: None,
        report_every: int = 10,
    ) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self._loss, self._schedule, self._micro_batch_size = loss, schedule, micro_batch_size
        self._report, self._report_every = report, report_every
        self._means = WeightedMeans(METRICS)
        self._stopwatch = Stopwatch(lambda: optimizer.seconds_waited)
        self.step = 0
        self._samples_seen = 0  # by this rank, since batch-norm statistics were pooled
        self._seconds = 0.0  # in `run_epoch`, but for the part of it that is going on
        self._epoch_began: float | None = None

    def run_epoch(self) -> None:
        """One pass over the data; afterwards the model can be evaluated and saved."""
        self.model.train()
        self._epoch_began = time.perf_counter()
        for inputs, target in self._stopwatch.batches(self.loader):
            self._set_learning_rate()
            self.optimizer.zero_grad()
            for piece_of_inputs, piece_of_target, is_last in self._pieces(inputs, target):
                if is_last:
                    self._backward(piece_of_inputs, piece_of_target)
                else:
                    with self.optimizer.accumulate():
                        self._backward(piece_of_inputs, piece_of_target)
            self.optimizer.step()
            self.step += 1
            self._samples_seen += len(target)
            self._stopwatch.end_step()
            if self.step % self._report_every == 0:
                self._report(self.progress())
        self.optimizer.flush()
        pool_batch_norm(self.model, self.loader.comm, self._samples_seen)
        self._samples_seen = 0
        self._seconds, self._epoch_began = self.seconds, None

    @property
    def seconds(self) -> float:
        """How long training has taken so far, evaluation not counted."""
        return self._seconds + (time.perf_counter() - self._epoch_began if self._epoch_began else 0.0)

    def progress(self) -> Progress:
        """Where training is. A collective operation."""
        step_ms, shares = over_ranks(self.loader.comm, self._stopwatch.take())
        progress = Progress(
            epoch=self.loader.samples / self.loader.dealer.num_examples,
            step=self.step,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            means=self._means.over_all_ranks(self.loader.comm),
            samples_per_second=self.loader.samples / self.seconds,
            step_ms=step_ms,
            shares=shares,
        )
        self._means.reset()
        return progress

    def _backward(self, inputs: Tensor, target: Tensor) -> None:
        if not len(target):  # more ranks than samples: this one only takes part in the exchange
            self.optimizer.backward(None)
            return
        output = self.model(inputs)
        self.optimizer.backward(self._loss(output, target), weight=len(target))
        self._means.update(output, target)

    def _pieces(self, inputs: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        size = self._micro_batch_size or max(1, len(target))
        pieces = list(zip(inputs.split(size), target.split(size), strict=True))
        for at, (piece_of_inputs, piece_of_target) in enumerate(pieces, 1):
            yield piece_of_inputs, piece_of_target, at == len(pieces)

    def _set_learning_rate(self) -> None:
        assert self.loader.share is not None
        samples_before = self.loader.samples - sum(self.loader.share.sizes)
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule(samples_before / self.loader.dealer.num_examples)
