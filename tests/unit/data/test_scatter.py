"""Scattered datasets: each rank its own samples, whatever is passed where, and mistakes are errors on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from renkei.communicators.communicator import Communicator
from renkei.data import scatter
from renkei.data.scatter import ScatteredDataset, scatter_dataset, scatter_index
from renkei.errors import MismatchError, UsageError
from renkei.testing import run_on_ranks

every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


def letters(length: int) -> list[str]:
    return [f"sample {at}" for at in range(length)]


def scattered(size: int, length: int, **options: Any) -> list[ScatteredDataset]:
    return run_on_ranks(size, lambda comm: scatter_dataset(letters(length), comm, **options))


def check_each_sample_is_somewhere_once(parts: list[ScatteredDataset], length: int) -> None:
    found = [part[at] for part in parts for at in range(len(part))]
    assert sorted(found) == sorted(letters(length))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def refusals(size: int, call: Callable[[Communicator], Any]) -> list[UsageError]:
    """What each rank is told."""

    def body(comm: Communicator) -> UsageError:
        with pytest.raises(UsageError) as caught:
            call(comm)
        return caught.value

    return run_on_ranks(size, body)


# -- what ranks get -----------------------------------------------------------------------------------------------


@every_size
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_is_on_one_rank(size: int, shuffle: bool, fixed: bool) -> None:
    for length in (1, size, 5 * size - 1):
        parts = scattered(size, length, shuffle=shuffle, seed=3, fixed=fixed)
        check_each_sample_is_somewhere_once(parts, length)


def test_fewer_samples_than_ranks_leave_ranks_with_none() -> None:
    parts = scattered(4, 2, shuffle=True, seed=0)
    check_each_sample_is_somewhere_once(parts, 2)
    assert [len(part) for part in parts] == [1, 1, 0, 0]


def test_without_shuffle_parts_follow_one_another() -> None:
    parts = scattered(3, 10)
    assert [part.indices.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert list(parts[2]) == ["sample 7", "sample 8", "sample 9"]


def test_a_part_ends_where_it_ends() -> None:
    (part, _) = scattered(2, 5)
    assert part[-1] == part[len(part) - 1]
    with pytest.raises(IndexError):
        part[len(part)]


@pytest.mark.parametrize("root", [0, 1, 2])
def test_the_roots_seed_counts(root: int) -> None:
    parts = run_on_ranks(3, lambda comm: scatter_dataset(letters(14), comm, root, shuffle=True, seed=comm.rank))
    expected = scattered(3, 14, shuffle=True, seed=root)
    assert [part.seed for part in parts] == [root] * 3
    assert [part.indices.tolist() for part in parts] == [part.indices.tolist() for part in expected]


def test_no_seed_is_one_at_random_the_same_on_all_ranks() -> None:
    draws = [scattered(3, 14, shuffle=True) for _ in range(3)]
    for parts in draws:
        assert len({part.seed for part in parts}) == 1
        check_each_sample_is_somewhere_once(parts, 14)
    assert len({parts[0].seed for parts in draws}) > 1


@pytest.mark.parametrize("root", [0, 2])
def test_the_roots_dataset_can_be_sent_to_all(root: int) -> None:
    def body(comm: Communicator) -> ScatteredDataset:
        own = letters(11) if comm.rank == root else None
        return scatter_dataset(own, comm, root, shuffle=True, seed=1, broadcast=True)

    check_each_sample_is_somewhere_once(run_on_ranks(3, body), 11)


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_a_rank_without_a_dataset_is_named_on_all_ranks() -> None:
    errors = refusals(3, lambda comm: scatter_dataset(None if comm.rank == 1 else letters(5), comm))
    assert {str(error) for error in errors} == {
        "rank 1 has no dataset; pass it on every rank, or broadcast=True to send it from rank 0"
    }


def test_different_lengths_are_listed_on_all_ranks() -> None:
    errors = refusals(3, lambda comm: scatter_dataset(letters(5 + comm.rank // 2), comm))
    assert all(isinstance(error, MismatchError) for error in errors)
    assert {str(error) for error in errors} == {
        "ranks have datasets of different lengths (rank 0: 5, rank 1: 5, rank 2: 6); give all the same samples"
    }


def test_different_ways_of_dealing_are_refused_on_all_ranks() -> None:
    errors = refusals(3, lambda comm: scatter_dataset(letters(5), comm, shuffle=comm.rank == 1, seed=0))
    assert {type(error) for error in errors} == {MismatchError}


@every_size
def test_an_empty_dataset_is_refused(size: int) -> None:
    errors = refusals(size, lambda comm: scatter_dataset([], comm))
    assert {str(error) for error in errors} == {"the dataset is empty"}


# -- ChainerMN's ranges -------------------------------------------------------------------------------------------


def test_scatter_index_gives_chainermns_ranges() -> None:
    strict = run_on_ranks(3, lambda comm: scatter_index(10, comm, force_equal_length=False))
    assert strict == [(0, 4), (4, 7), (7, 10)]
    assert run_on_ranks(3, lambda comm: scatter_index(10, comm)) == [(0, 4), (3, 7), (6, 10)]
    assert run_on_ranks(3, lambda comm: scatter_index(0, comm)) == [(0, 0)] * 3


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_each_rank_uses_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Diverging(ScatteredDataset):
        def __init__(self, dataset: Any, *, rank: int, seed: int, **options: Any) -> None:
            super().__init__(dataset, rank=rank, seed=seed + rank, **options)

    monkeypatch.setattr(scatter, "ScatteredDataset", Diverging)
    with pytest.raises(AssertionError):
        check_each_sample_is_somewhere_once(scattered(3, 14, shuffle=True, seed=0), 14)


def test_red_twin_a_part_that_lacks_its_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScatteredDataset, "__len__", lambda self: len(self.indices) - 1)
    with pytest.raises(AssertionError):
        check_each_sample_is_somewhere_once(scattered(2, 9), 9)
