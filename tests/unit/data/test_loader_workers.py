"""Data workers: the same batches, and random numbers that differ by rank, worker and epoch but not from run to run."""

from __future__ import annotations

import random
import sys

import cloudpickle
import numpy as np
import torch

import renkei
from renkei.communicators.communicator import Communicator
from renkei.data.loader import DataLoader
from renkei.data.sharding import permutation

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # new processes can't import a test

NUM_WORKERS = 2


# Worker, seed, and a number from each generator; a plain tuple, for torch's workers can't send a test's own classes.
Draw = tuple[int, int, tuple[float, float, float]]


class Draws:
    """Each sample is what the worker that fetches it draws from its generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> Draw:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        return worker.id, torch.initial_seed(), (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_workers_give_the_same_batches_in_the_same_order() -> None:
    with renkei.create_communicator() as comm:
        loader = DataLoader(range(43), comm, global_batch_size=8, shuffle=True, num_workers=NUM_WORKERS)
        for epoch in range(2):
            batches = [batch.tolist() for batch in loader]
            order = permutation(43, seed=0, epoch=epoch)
            assert batches == [order[begin : begin + 8].tolist() for begin in range(0, 43, 8)]
        loader.load_state_dict({"samples": 16})
        assert next(iter(loader)).tolist() == permutation(43, seed=0, epoch=0)[16:24].tolist()


def two_epochs(comm: Communicator) -> list[tuple[int, int, int, tuple[float, ...]]]:
    """Epoch, worker, seed and what was drawn, for each of this rank's batches."""
    loader = DataLoader(Draws(), comm, global_batch_size=4, num_workers=NUM_WORKERS)
    found = []
    for epoch in range(2):
        for worker, seed, drawn in loader:
            found.append((epoch, int(worker[0]), int(seed[0]), tuple(float(each[0]) for each in drawn)))
    return found


def run_twice() -> list[list[tuple[int, int, int, tuple[float, ...]]]]:
    with renkei.create_communicator() as comm:
        torch.manual_seed(random.SystemRandom().randrange(2**31))  # workers' numbers don't hang on this
        return [two_epochs(comm), two_epochs(comm)]


def test_random_numbers_differ_by_rank_worker_and_epoch_and_are_the_same_in_a_repeated_run() -> None:
    by_rank = renkei.run(run_twice, 2)
    for first, second in by_rank:
        assert first == second
    draws = {
        (rank, epoch, worker): (seed, drawn)
        for rank, (run, _) in enumerate(by_rank)
        for epoch, worker, seed, drawn in run
    }
    assert set(draws) == {(rank, epoch, worker) for rank in range(2) for epoch in range(2) for worker in range(2)}
    assert len({seed for seed, _ in draws.values()}) == len(draws)
    for generator in range(3):
        assert len({drawn[generator] for _, drawn in draws.values()}) == len(draws)
