"""The loader gives each rank its share of the same global batches, and says how each was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from renkei.communicators.communicator import Communicator
from renkei.data.loader import DataLoader
from renkei.data.scatter import scatter_dataset
from renkei.data.sharding import Dealer, Indices, permutation
from renkei.errors import MismatchError, UnevenBatchError, UsageError
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.testing import run_on_ranks

every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


class Picture(NamedTuple):
    pixels: Tensor
    label: int


class Pictures:
    """Samples as nests of tensors of several dtypes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"picture": Picture(torch.full((3, 4), at, dtype=torch.float16), at), "pair": (at / 2, torch.tensor(at))}


class ByItself(Pictures):
    """A dataset that makes its own batches, as others than `default_collate` would."""

    def batch(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices).to(torch.float64).unsqueeze(1).expand(-1, 7)


def joined(shares: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(shares))


def epochs_of(size: int, num_epochs: int, **options: Any) -> list[list[list[int]]]:
    """By epoch and batch, the samples on all ranks, in the order of ranks."""

    def body(comm: Communicator) -> list[list[list[int]]]:
        loader = DataLoader(
            range(options["num_examples"]), comm, shuffle=True, seed=5, global_batch_size=options["batch"]
        )
        return [[batch.tolist() for batch in loader] for _ in range(num_epochs)]

    by_rank = run_on_ranks(size, body)
    return [[joined(shares) for shares in zip(*epochs, strict=True)] for epochs in zip(*by_rank, strict=True)]


# -- batches ------------------------------------------------------------------------------------------------------


def check_epochs(size: int) -> None:
    """Three epochs of awkward numbers are slices of the orders that go with their numbers."""
    expected = [
        [order[begin : begin + 8].tolist() for begin in range(0, 43, 8)]
        for order in (permutation(43, seed=5, epoch=epoch) for epoch in range(3))
    ]
    assert epochs_of(size, 3, num_examples=43, batch=8) == expected


@every_size
def test_epochs_advance_by_themselves_and_batches_do_not_depend_on_ranks(size: int) -> None:
    check_epochs(size)


@every_size
def test_share_is_right_while_its_batch_is_out(size: int) -> None:
    def body(comm: Communicator) -> None:
        loader = DataLoader(range(43), comm, global_batch_size=8)
        assert loader.share is None
        for _ in range(2):
            for at, batch in enumerate(loader):
                assert loader.share == loader.dealer.share(at)
                assert comm.shares == {loader: loader.share}
                assert len(batch) == loader.share.sizes[comm.rank]
            assert at == len(loader) - 1
            assert loader.share is None
            assert comm.shares == {}

    run_on_ranks(size, body)


def test_a_scattered_dataset_is_dealt_anew_each_epoch() -> None:
    def body(comm: Communicator) -> list[list[int]]:
        loader = DataLoader(scatter_dataset(range(11), comm, shuffle=True, seed=2), comm, global_batch_size=4)
        return [[int(at) for batch in loader for at in batch] for _ in range(2)]

    epochs = list(zip(*run_on_ranks(3, body), strict=True))
    assert [sorted(joined(ranks)) for ranks in epochs] == [list(range(11))] * 2
    assert set(epochs[0][0]) != set(epochs[1][0])


def test_a_scattered_dataset_keeps_what_it_was_scattered_with() -> None:
    def body(comm: Communicator) -> None:
        dataset = scatter_dataset(range(11), comm, shuffle=True, seed=2, fixed=True)
        dealer = DataLoader(dataset, comm, global_batch_size=4).dealer
        assert dealer == Dealer(num_examples=11, global_batch_size=4, num_ranks=2, shuffle=True, seed=2, fixed=True)
        assert {int(at) for batch in DataLoader(dataset, comm, global_batch_size=4) for at in batch} == {*dataset}

    run_on_ranks(2, body)


def test_an_epoch_left_early_is_not_gone_on_with() -> None:
    def body(comm: Communicator) -> list[int]:
        loader = DataLoader(range(10), comm, global_batch_size=4, shuffle=True)
        for _ in loader:
            break
        assert loader.epoch == 0
        samples = [int(at) for batch in loader for at in batch]
        assert loader.samples == 20
        assert loader.epoch == 2
        return samples

    assert run_on_ranks(1, body)[0] == permutation(10, seed=0, epoch=1).tolist()


# -- nests and empty shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_share_has_the_datasets_structure_also_where_it_is_empty(rank: int) -> None:
    def body(comm: Communicator) -> Any:
        return next(iter(DataLoader(Pictures(2), comm, global_batch_size=9)))

    batch = run_on_ranks(3, body)[rank]
    length = 1 if rank < 2 else 0
    assert isinstance(batch["picture"], Picture)
    assert (batch["picture"].pixels.shape, batch["picture"].pixels.dtype) == ((length, 3, 4), torch.float16)
    assert (batch["picture"].label.shape, batch["picture"].label.dtype) == ((length,), torch.int64)
    assert [(part.shape, part.dtype) for part in batch["pair"]] == [
        ((length,), torch.float64),
        ((length,), torch.int64),
    ]


def test_a_dataset_that_makes_its_batches_is_asked_for_empty_ones_too() -> None:
    def body(comm: Communicator) -> Tensor:
        return next(iter(DataLoader(ByItself(2), comm, global_batch_size=9)))

    batches = run_on_ranks(3, body)
    assert [tuple(batch.shape) for batch in batches] == [(1, 7), (1, 7), (0, 7)]
    assert {batch.dtype for batch in batches} == {torch.float64}


def test_the_users_collate_fn_is_used_also_where_the_dataset_makes_batches() -> None:
    def body(comm: Communicator) -> Tensor:
        def collate(samples: list[Any]) -> Tensor:
            return torch.tensor([sample["picture"].label for sample in samples])

        return next(iter(DataLoader(ByItself(5), comm, global_batch_size=5, collate_fn=collate)))

    assert [batch.tolist() for batch in run_on_ranks(2, body)] == [[0, 1, 2], [3, 4]]


class OnlyMine:
    """Samples that one rank can't read lie with another."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: int) -> int:
        assert at % 3 == self.rank, f"rank {self.rank} reads sample {at}"
        return at


def test_an_empty_share_of_samples_that_lie_elsewhere_is_made_of_an_own_one() -> None:
    def body(comm: Communicator) -> list[list[int]]:
        dataset = scatter_dataset(OnlyMine(comm.rank), comm, fixed=True)
        return [batch.tolist() for batch in DataLoader(dataset, comm, global_batch_size=2)]

    assert run_on_ranks(3, body) == [[[0], [3], []], [[1], [], [4]], [[], [2], []]]


# -- several loaders ----------------------------------------------------------------------------------------------


def plain_step(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=0.1), comm)
    weight.sum().backward()
    optimizer.step()


def test_the_uneven_batch_of_any_loader_that_is_out_is_seen() -> None:
    def body(comm: Communicator) -> None:
        uneven = DataLoader(range(10), comm, global_batch_size=3)
        even = DataLoader(range(12), comm, global_batch_size=4)
        for _ in zip(uneven, even, strict=False):
            with pytest.raises(UnevenBatchError, match="ranks get 1 or 2 samples"):
                plain_step(comm)

    run_on_ranks(2, body)


def test_a_loop_that_has_ended_says_nothing_about_other_batches() -> None:
    def body(comm: Communicator) -> None:
        for _ in DataLoader(range(10), comm, global_batch_size=3):
            pass
        plain_step(comm)

    run_on_ranks(2, body)


def test_ranks_that_make_different_loaders_are_told_the_first_difference() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            DataLoader(range(10), comm, global_batch_size=4, shuffle=True, seed=comm.rank // 2)
        return str(caught.value)

    assert set(run_on_ranks(3, body)) == {
        "rank 2 has made a loader with seed=1 where rank 0 has seed=0; make the same one on every rank"
    }


# -- what it says and refuses -------------------------------------------------------------------------------------


def test_rank_0_says_how_batches_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(3, lambda comm: DataLoader(range(359), comm, global_batch_size=16))
    assert capsys.readouterr().err == (
        "renkei: global batch 16 = 5 or 6 on each of 3 ranks; 23 batches an epoch, the last of 7\n"
    )
    run_on_ranks(1, lambda comm: DataLoader(range(359), comm, global_batch_size=16))
    assert capsys.readouterr().err == ""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


MISTAKES: dict[str, Callable[[Communicator], object]] = {
    "an IterableDataset can't be dealt": lambda comm: DataLoader(Stream(), comm, global_batch_size=2),
    "global_batch_size is 0, but must be a whole number": lambda comm: DataLoader([1], comm, global_batch_size=0),
    "global_batch_size is -3": lambda comm: DataLoader([1], comm, global_batch_size=-3),
    "global_batch_size is 2.5": lambda comm: DataLoader([1], comm, global_batch_size=2.5),
    "global_batch_size is '4'": lambda comm: DataLoader([1], comm, global_batch_size="4"),
    "the dataset is empty": lambda comm: DataLoader([], comm, global_batch_size=2),
    "shuffle and seed go to scatter_dataset": lambda comm: DataLoader(
        scatter_dataset(range(4), comm), comm, global_batch_size=2, shuffle=True
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_refused(message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_on_ranks(2, MISTAKES[message])


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_the_epoch_is_not_advanced(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.order
    monkeypatch.setattr(Dealer, "order", lambda self, epoch: honest(self, 0))
    with pytest.raises(AssertionError):
        check_epochs(size=2)


def test_red_twin_the_last_batch_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.deal
    monkeypatch.setattr(Dealer, "deal", lambda self, *place: iter(list(honest(self, *place))[:-1]))
    with pytest.raises(AssertionError):
        check_epochs(size=2)


def test_red_twin_ranks_are_dealt_each_others_share(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.deal

    def swapped(self: Dealer, rank: int, *place: int) -> Iterator[Indices]:
        return honest(self, self.num_ranks - 1 - rank, *place)

    monkeypatch.setattr(Dealer, "deal", swapped)
    with pytest.raises(AssertionError):
        check_epochs(size=2)
