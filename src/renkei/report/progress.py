"""Progress on the terminal: from rank 0 alone, live where there is a terminal, plain lines where there is none.

Everything goes to standard error; standard output belongs to results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from renkei.communicators.communicator import Communicator
from renkei.training.trainer import Progress as TrainingProgress

_PLAIN_EVERY = 5.0  # seconds between lines


class Display(Protocol):
    """Shows how training goes."""

    def progress(self, progress: TrainingProgress) -> None:
        """Steps have been taken."""

    def evaluation(self, epoch: int, result: Mapping[str, float]) -> None:
        """An epoch has ended, and the model was evaluated."""


@contextmanager
def create_display(comm: Communicator, num_epochs: int) -> Iterator[Display]:
    """The display that suits this rank and where its standard error goes."""
    console = Console(stderr=True)
    if comm.rank != 0:
        yield _Silent()
    elif not console.is_terminal:
        yield _Plain(num_epochs)
    else:
        with _bar(console) as bar:
            yield _Live(bar, num_epochs)


def describe(progress: TrainingProgress) -> str:
    """The numbers that matter, in one line; of where time goes, what amounts to a per cent."""
    shares = [f"{share:.0%} {part}" for part, share in progress.shares.items() if share >= 0.01]
    numbers = f"loss {progress.means['loss']:.4f}", f"top-1 {progress.means['top1']:.3f}"
    return "  ".join([*numbers, f"{progress.samples_per_second:,.0f} samples/s", *shares])


def describe_evaluation(epoch: int, num_epochs: int, result: Mapping[str, float]) -> str:
    """An evaluation in one line."""
    numbers = "  ".join(f"{name.replace('top1', 'top-1')} {value:.4f}" for name, value in result.items())
    return f"epoch {epoch} of {num_epochs}  evaluation: {numbers}"


class _Silent:
    def progress(self, progress: TrainingProgress) -> None:
        pass

    def evaluation(self, epoch: int, result: Mapping[str, float]) -> None:
        pass


class _Plain:
    def __init__(self, num_epochs: int) -> None:
        self._num_epochs = num_epochs
        self._last = time.monotonic()

    def progress(self, progress: TrainingProgress) -> None:
        if time.monotonic() - self._last >= _PLAIN_EVERY:
            self._last = time.monotonic()
            line = f"epoch {progress.epoch:.2f} of {self._num_epochs}  {describe(progress)}"
            print(line, file=sys.stderr, flush=True)

    def evaluation(self, epoch: int, result: Mapping[str, float]) -> None:
        print(describe_evaluation(epoch, self._num_epochs, result), file=sys.stderr, flush=True)


class _Live:
    def __init__(self, bar: Progress, num_epochs: int) -> None:
        self._bar, self._num_epochs = bar, num_epochs
        self._task = bar.add_task("", total=num_epochs, numbers="")

    def progress(self, progress: TrainingProgress) -> None:
        epoch = progress.epoch
        self._bar.update(self._task, completed=epoch, description=self._describe(epoch), numbers=describe(progress))

    def evaluation(self, epoch: int, result: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=epoch, description=self._describe(epoch))
        self._bar.print(describe_evaluation(epoch, self._num_epochs, result), highlight=False)

    def _describe(self, epoch: float) -> str:
        return f"epoch {epoch:.1f} of {self._num_epochs}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len("epoch 10.0 of 10"))),
        BarColumn(bar_width=20),  # this and the numbers give way where the terminal is narrow
        TaskProgressColumn(table_column=Column(no_wrap=True, min_width=len("100%"))),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
        TextColumn("{task.fields[numbers]}"),
        console=console,
    )
