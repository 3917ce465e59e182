"""Contestants in an all-reduce: their sums are right, what isn't is refused on every rank, and all get their turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from renkei.bench import contestants
from renkei.bench.all_reduce import _addends, check_sum, measure
from renkei.bench.bandwidth import COPY, AllReduceTime
from renkei.bench.contestants import DTYPES, Contestant, Job
from renkei.bench.mpi_peers import sum_in_shared_memory
from renkei.communicators.communicator import Communicator
from renkei.errors import RenkeiError
from renkei.machine import available_memory, describe_machine
from renkei.testing import run_on_ranks

NUMEL = 1009


# -- sums are checked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_right_sum_passes(size: int, dtype: str) -> None:
    def check(comm: Communicator) -> None:
        with contestants.communicator(comm).prepare(NUMEL, DTYPES[dtype]) as job:
            check_sum(comm, "flat", job)

    run_on_ranks(size, check)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 64, 128])
def test_addends_and_their_sums_are_exact_in_every_dtype(num_ranks: int) -> None:
    for dtype in DTYPES.values():
        narrow, wide = (torch.empty(NUMEL, dtype=each) for each in (dtype, torch.float64))
        for rank in range(num_ranks):
            for own, exact in zip(_addends(rank, num_ranks, narrow), _addends(rank, num_ranks, wide), strict=True):
                assert torch.equal(own.double(), exact)


def off_by_one(buffer: torch.Tensor) -> None:
    buffer[-1] += 1


def shifted(buffer: torch.Tensor) -> None:
    buffer.copy_(buffer.roll(512))


def stale(buffer: torch.Tensor) -> None:
    buffer[: NUMEL // 2] = 0


@pytest.mark.parametrize("spoil", [off_by_one, shifted, stale])
@pytest.mark.parametrize("culprit", [0, 1])
def test_red_twin_a_wrong_sum_is_refused_on_every_rank(spoil: Callable[[torch.Tensor], None], culprit: int) -> None:
    def add_wrongly(comm: Communicator) -> str:
        with contestants.communicator(comm).prepare(NUMEL, torch.bfloat16) as (buffer, add):

            def wrong() -> None:
                add()
                if comm.rank == culprit:
                    spoil(buffer)

            with pytest.raises(RenkeiError) as caught:
                check_sum(comm, "flat/gloo", (buffer, wrong))
        return str(caught.value)

    one, other = run_on_ranks(2, add_wrongly)
    assert one == other
    assert one.startswith("flat/gloo adds wrongly: element ")
    assert f"of {NUMEL} torch.bfloat16 on rank {culprit} is " in one


# -- turns --------------------------------------------------------------------------------------------------------


def in_turns(comm: Communicator, dtype: str = "float32", num_bytes: int = 4 * NUMEL + 3) -> list[AllReduceTime]:
    everyone = [contestants.communicator(comm), contestants.copy(comm)]
    return measure(comm, everyone, dtype=dtype, num_bytes=num_bytes, rounds=5)


def test_all_ranks_get_the_same_results() -> None:
    one, other = run_on_ranks(2, in_turns, backend="gloo")
    assert one == other
    assert [(each.communicator, each.backend) for each in one] == [("flat", "gloo"), (COPY, None)]
    assert {each.bytes for each in one} == {4 * NUMEL}  # what is beyond the last element is left out


def counting(comm: Communicator, name: str, counts: dict[str, int], dtypes: tuple[str, ...]) -> Contestant:
    @contextmanager
    def prepare(numel: int, dtype: torch.dtype) -> Iterator[Job]:
        with contestants.communicator(comm).prepare(numel, dtype) as (buffer, add):

            def count() -> None:
                assert torch.isfinite(buffer).all()
                counts[name] = counts.get(name, 0) + 1
                add()

            yield buffer, count

    return Contestant(name, None, prepare, dtypes)


def test_each_gets_as_many_turns_unless_it_does_not_know_the_dtype() -> None:
    def play(comm: Communicator) -> tuple[dict[str, int], int, list[str]]:
        counts: dict[str, int] = {}
        turns: list[None] = []
        everyone = [
            counting(comm, "a", counts, ("float16",)),
            counting(comm, "b", counts, ("float16", "float32")),
            counting(comm, "c", counts, ("float32",)),
            contestants.copy(comm),
        ]
        found = measure(comm, everyone, dtype="float16", num_bytes=100, rounds=6, on_turn=lambda: turns.append(None))
        return counts, len(turns), [each.name for each in found]

    for counts, turns, names in run_on_ranks(3, play):
        assert counts["a"] == counts["b"] > 6
        assert turns == 3 * 6
        assert names == ["a", "b", COPY]


# -- shared memory, without MPI -----------------------------------------------------------------------------------


class World:
    """Ranks that are threads, as far as the sum in shared memory talks to them."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier) -> None:
        self.rank, self.size, self._barrier = rank, size, barrier

    def Barrier(self) -> None:
        self._barrier.wait(10)

    def Sync(self) -> None:
        pass


def sum_on_threads(arrays: list[np.ndarray[Any, Any]], times: int) -> None:
    size = len(arrays)
    barrier = threading.Barrier(size)

    def body(rank: int) -> None:
        world = World(rank, size, barrier)
        add = sum_in_shared_memory(world, world, arrays)
        for _ in range(times):
            add()

    ranks = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


@pytest.mark.parametrize("numel", [1, 2, 1009, 100_003])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_sum_in_shared_memory_is_right_and_can_be_repeated(size: int, numel: int) -> None:
    arrays = [np.arange(numel, dtype="float64") % (7 + rank) for rank in range(size)]
    total = sum(arrays)
    sum_on_threads(arrays, times=3)
    for array in arrays:
        np.testing.assert_array_equal(array, total * size**2)


def test_the_host_is_described() -> None:
    assert describe_machine().endswith(("core", "cores"))
    assert 2**20 < available_memory() < 2**60
