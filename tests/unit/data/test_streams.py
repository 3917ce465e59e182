"""Random streams: shared where ranks must do alike, apart where they must not, and the same on every machine."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from renkei.data.streams import batch_seed, rank_seed, seed_default_generators, shared_seed

NAMES = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))


def seed_of(name: tuple[int, int, int, int]) -> int:
    seed, rank, epoch, batch = name
    return batch_seed(seed, rank=rank, epoch=epoch, batch=batch)


@settings(deadline=None)
@given(NAMES, NAMES)
def test_streams_of_different_names_differ(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> None:
    assert (seed_of(one) == seed_of(other)) == (one == other)


def test_no_two_of_many_streams_collide() -> None:
    names = [
        (seed, rank, epoch, batch)
        for seed in range(5)
        for rank in range(40)
        for epoch in range(5)
        for batch in range(5)
    ]
    seeds = {seed_of(name) for name in names}
    seeds |= {shared_seed(seed, *where) for seed in range(5) for where in [(), (0,), (1,), (0, 0), (0, 1)]}
    seeds |= {rank_seed(seed, rank=rank) for seed in range(5) for rank in range(40)}
    assert len(seeds) == len(names) + 25 + 200


def test_seeds_are_what_they_always_were() -> None:
    assert shared_seed(0) == 4687786671339450999
    assert shared_seed(0, 1) == 1433723040163775682
    assert rank_seed(0, rank=0) == 409693835246926987
    assert rank_seed(0, rank=1) == 853108786945526892
    assert rank_seed(1, rank=0) == 2416002237027240023
    assert batch_seed(0, rank=0, epoch=0, batch=0) == 5873171400497004975
    assert batch_seed(0, rank=1, epoch=2, batch=3) == 3087975972743483179


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
    monkeypatch.setitem(globals(), "batch_seed", lambda seed, *, rank, epoch, batch: seed + rank + epoch + batch)
    with pytest.raises(AssertionError):
        test_no_two_of_many_streams_collide()
