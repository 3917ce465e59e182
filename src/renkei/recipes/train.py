"""Training by a recipe, from data to result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from renkei.communicators.communicator import Communicator
from renkei.communicators.factory import create_communicator
from renkei.data.loader import DataLoader
from renkei.data.scatter import scatter_dataset
from renkei.data.streams import rank_seed, seed_default_generators, shared_seed
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.optim.schedules import cosine, gradual_warmup
from renkei.recipes.recipe import Recipe, Settings
from renkei.recipes.threads import set_threads
from renkei.report.progress import create_display
from renkei.training.evaluation import evaluate
from renkei.training.metrics import METRICS
from renkei.training.records import RunRecord
from renkei.training.run_dir import new_run_dir
from renkei.training.trainer import Progress, Trainer


def train(recipe: Recipe, settings: Settings, run_dir: Path | None = None) -> dict[str, Any]:
    """Train by a recipe, in the job this process was started in; returns what `renkei train --json` prints.

    Args:
        run_dir: the folder for the run's records; a new one under ``runs`` if None.
    """
    began = time.perf_counter()
    training_set, evaluation_set = recipe.load(settings)  # what is wrong with it is told before anybody is waited for
    set_threads(settings.threads)
    with create_communicator(settings.communicator) as comm:
        run_dir = Path(comm.broadcast_object(str(run_dir or new_run_dir(recipe.name))))
        record = RunRecord(run_dir, comm, {"recipe": recipe.name, **settings.model_dump()})
        with create_display(comm, settings.epochs) as display:

            def report(progress: Progress) -> None:
                record.write("progress", **vars(progress))
                display.progress(progress)
                _record_choice(record, trainer.optimizer)

            trainer = create_trainer(recipe, settings, comm, training_set, report)
            for epoch, result in enumerate(_epochs(trainer, evaluation_set, settings), 1):
                record.write("evaluation", epoch=epoch, **result)
                display.evaluation(epoch, result)
        _record_choice(record, trainer.optimizer)
        summary = {
            "recipe": recipe.name,
            "world_size": comm.size,
            "epochs": settings.epochs,
            "steps": trainer.step,
            **result,
            "samples_per_second": round(trainer.loader.samples / trainer.seconds, 1),
            "seconds": round(time.perf_counter() - began, 2),
            "run_dir": str(run_dir),
        }
        record.finish(summary)
        trainer.optimizer.close()
    return summary


def _record_choice(record: RunRecord, optimizer: MultiNodeOptimizer) -> None:
    """Write down what ``wire=auto`` has chosen."""
    chosen = optimizer.chosen
    if chosen is not None:
        record.add(chosen={"wire": chosen.way.wire, "double_buffering": chosen.way.is_late, "why": chosen.why})


def _epochs(trainer: Trainer, evaluation_set: Any, settings: Settings) -> Iterator[dict[str, float]]:
    """Train epoch by epoch; gives the evaluation after each."""
    comm, batch_size = trainer.loader.comm, settings.evaluation_batch_size
    for _ in range(settings.epochs):
        trainer.run_epoch()
        yield evaluate(trainer.model, evaluation_set, comm, batch_size=batch_size, metrics=METRICS)


def create_trainer(
    recipe: Recipe,
    settings: Settings,
    comm: Communicator,
    training_set: Any,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Trainer:
    """A trainer of the recipe's model: weights from the shared random stream, dropout from each rank's own."""
    loader = DataLoader(
        scatter_dataset(training_set, comm, shuffle=True, seed=settings.seed),
        comm,
        global_batch_size=settings.global_batch_size,
    )
    seed_default_generators(shared_seed(settings.seed))
    model = recipe.build(settings).to(comm.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # not among torch's annotations
    seed_default_generators(rank_seed(settings.seed, rank=comm.rank))
    return Trainer(
        model,
        MultiNodeOptimizer(
            _create_sgd(model, settings),
            comm,
            model=model,
            wire=settings.wire,
            double_buffering=settings.double_buffering,
        ),
        loader,
        loss=partial(nn.functional.cross_entropy, label_smoothing=settings.label_smoothing),
        schedule=gradual_warmup(cosine(settings.learning_rate, settings.epochs), settings.warmup_epochs),
        micro_batch_size=settings.micro_batch_size,
        report=report,
        report_every=settings.report_every,
    )


def _create_sgd(model: nn.Module, settings: Settings) -> torch.optim.SGD:
    """SGD with weight decay on matrices and kernels only: biases and batch normalization are not to be drawn to 0."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.SGD(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov and settings.momentum > 0,
    )
