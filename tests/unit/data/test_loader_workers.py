"""Data workers: the same batches, and random numbers that hang on rank, epoch and batch only."""

from __future__ import annotations

import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch

import renkei
from renkei.communicators.communicator import Communicator
from renkei.data import loader
from renkei.data.loader import DataLoader
from renkei.data.sharding import permutation

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # new processes can't import a test


class Draws:
    """Each sample is what the worker that makes it draws from Python's, NumPy's and torch's generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> tuple[float, float, float]:
        assert torch.utils.data.get_worker_info() is not None
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_workers_give_the_same_batches_in_the_same_order() -> None:
    with renkei.create_communicator() as comm:
        source = DataLoader(range(43), comm, global_batch_size=8, shuffle=True, num_workers=2)
        for epoch in range(2):
            batches = [batch.tolist() for batch in source]
            order = permutation(43, seed=0, epoch=epoch)
            assert batches == [order[begin : begin + 8].tolist() for begin in range(0, 43, 8)]
        source.load_state_dict({"samples": 16})
        assert next(iter(source)).tolist() == permutation(43, seed=0, epoch=0)[16:24].tolist()


Numbers = tuple[tuple[float, ...], ...]  # what a rank's part of a batch was drawn as, by generator


def draw(comm: Communicator, num_workers: int, samples_before: int = 0) -> list[Numbers]:
    """By batch, two epochs in all."""
    source = DataLoader(Draws(), comm, global_batch_size=4, num_workers=num_workers)
    source.load_state_dict({"samples": samples_before})
    found: list[Numbers] = []
    while source.epoch < 2:
        found += (tuple(tuple(each.tolist()) for each in batch) for batch in source)
    return found


def draw_in_many_ways() -> tuple[list[Numbers], list[Numbers], list[Numbers]]:
    with renkei.create_communicator() as comm:
        torch.manual_seed(random.SystemRandom().randrange(2**31))  # workers' numbers don't hang on this
        return draw(comm, 2), draw(comm, 1), draw(comm, 2, samples_before=16)


def test_random_numbers_hang_on_rank_epoch_and_batch_and_on_nothing_else() -> None:
    by_rank = renkei.run(draw_in_many_ways, 2)
    for all_batches, by_one_worker, after_the_fourth in by_rank:
        assert len(all_batches) == 6
        assert by_one_worker == all_batches
        assert after_the_fourth == all_batches[4:]
    for generator in range(3):
        numbers = [number for batches, _, _ in by_rank for batch in batches for number in batch[generator]]
        assert len(set(numbers)) == len(numbers) == 24


def test_red_twin_a_seed_that_forgets_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "batch_seed", lambda seed, *, rank, epoch, batch: rank)
    with renkei.create_communicator() as comm:
        batches = draw(comm, 1)
    assert batches == [batches[0]] * 6
