"""Choosing the recipes' settings, on samples held out of their training sets; the sets they report on are not read.

python benchmarks/settings.py [digits] [fashion-mnist]
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import torch

import renkei
from record import Record, table
from renkei.data.datasets import ImageDataset, split
from renkei.recipes import RECIPES
from renkei.recipes.recipe import Recipe, Settings
from renkei.recipes.train import create_trainer
from renkei.training.evaluation import evaluate
from renkei.training.metrics import METRICS

HELD_OUT = {"digits": 288, "fashion-mnist": 10_000}
GRIDS: dict[str, dict[str, list[Any]]] = {
    "digits": {"learning_rate": [0.02, 0.05, 0.1, 0.2], "epochs": [12, 20], "weight_decay": [5e-4, 5e-3]},
    "fashion-mnist": {"learning_rate": [0.05, 0.1, 0.2, 0.4], "weight_decay": [5e-4, 1e-3]},
}
SEEDS = {"digits": 3, "fashion-mnist": 1}


def accuracy(recipe: Recipe, settings: Settings, train: ImageDataset, held_out: ImageDataset) -> float:
    with renkei.create_communicator() as comm:
        trainer = create_trainer(replace(recipe, settings=settings), settings, comm, train)
        for _ in range(settings.epochs):
            trainer.run_epoch()
        return evaluate(trainer.model, held_out, comm, batch_size=512, metrics=METRICS)["top1"]


def main() -> None:
    torch.set_num_threads(1)
    record = Record("settings")
    parts = []
    for name in sys.argv[1:] or GRIDS:
        recipe, grid = RECIPES[name](), GRIDS[name]
        train, held_out = split(recipe.load(recipe.settings)[0], HELD_OUT[name], seed=1)
        rows = []
        for values in itertools.product(*grid.values()):
            changes = dict(zip(grid, values, strict=True))
            found = []
            for seed in range(SEEDS[name]):
                settings = recipe.settings.model_copy(update={**changes, "seed": seed})
                found.append(accuracy(recipe, settings, train, held_out))
                record.add(recipe=name, seed=seed, top1=found[-1], **changes)
            rows.append((*values, f"{sum(found) / len(found):.4f}"))
        parts.append(
            f"## {name}\n\n{len(held_out):,} held out, {SEEDS[name]} seeds.\n\n" + table((*grid, "top-1"), rows)
        )
    print(record.write("Choosing the recipes' settings", "\n\n".join(parts)))


if __name__ == "__main__":
    main()
