"""Random streams: shared where ranks must do alike, apart where they must not, and the same on every machine."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from renkei.data.streams import rank_seed, seed_default_generators, shared_seed

NAMES = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))


def seed_of(name: tuple[int, int, int, int]) -> int:
    seed, rank, worker, epoch = name
    return rank_seed(seed, rank=rank, worker=worker, epoch=epoch)


@settings(deadline=None)
@given(NAMES, NAMES)
def test_streams_of_different_names_differ(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> None:
    assert (seed_of(one) == seed_of(other)) == (one == other)


def test_no_two_of_many_streams_collide() -> None:
    names = [
        (seed, rank, worker, epoch)
        for seed in range(5)
        for rank in range(40)
        for worker in range(5)
        for epoch in range(5)
    ]
    seeds = {seed_of(name) for name in names}
    seeds |= {shared_seed(seed, *where) for seed in range(5) for where in [(), (0,), (1,), (0, 0), (0, 1)]}
    assert len(seeds) == len(names) + 25


def test_seeds_are_what_they_always_were() -> None:
    assert shared_seed(0) == 4687786671339450999
    assert shared_seed(0, 1) == 1433723040163775682
    assert rank_seed(0, rank=0) == 1554758172412650861
    assert rank_seed(0, rank=1) == 2051024592866470249
    assert rank_seed(1, rank=0) == 5276183605560002157
    assert rank_seed(0, rank=0, worker=1, epoch=2) == 433436324052790178


def test_numpys_integers_name_the_same_stream() -> None:
    assert rank_seed(np.int64(7), rank=np.int32(1)) == rank_seed(7, rank=1)
    assert shared_seed(np.uint8(7)) == shared_seed(7)


def test_seeds_have_63_bits() -> None:
    seeds = [rank_seed(0, rank=rank) for rank in range(1000)]
    assert 2**62 < max(seeds) < 2**63
    assert min(seeds) >= 0


def test_the_generators_of_python_numpy_and_torch_are_seeded() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_default_generators(rank_seed(3, rank=2))
    first = draws()
    others = draws()
    seed_default_generators(rank_seed(3, rank=2))
    assert draws() == first
    seed_default_generators(rank_seed(3, rank=1))
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    assert all(a != b for a, b in zip(others, first, strict=True))


def test_red_twin_seed_plus_rank_makes_streams_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "rank_seed", lambda seed, *, rank, worker, epoch: seed + rank + worker + epoch)
    with pytest.raises(AssertionError):
        test_no_two_of_many_streams_collide()
