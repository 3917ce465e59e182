"""A loader's position is one integer; from any batch, on any number of ranks, what follows is exactly the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renkei.communicators.communicator import Communicator
from renkei.data.loader import DataLoader
from renkei.data.sharding import Dealer
from renkei.errors import UsageError
from renkei.testing import run_on_ranks

State = dict[str, int]
NUM_EPOCHS = 2


def create(comm: Communicator, num_examples: int, batch: int) -> DataLoader:
    return DataLoader(range(num_examples), comm, shuffle=True, seed=9, global_batch_size=batch)


def follow(loader: DataLoader) -> Iterator[tuple[list[int], State]]:
    """This rank's share of each batch until the second epoch ends, and the state while it is out."""
    while loader.epoch < NUM_EPOCHS:
        for share in loader:
            yield share.tolist(), loader.state_dict()


def run(size: int, num_examples: int, batch: int, state: State | None = None) -> tuple[list[list[int]], list[State]]:
    """The samples of each batch from a state on, over all ranks, and the states they leave, which ranks agree on."""

    def body(comm: Communicator) -> list[tuple[list[int], State]]:
        loader = create(comm, num_examples, batch)
        if state is not None:
            loader.load_state_dict(state)
        return list(follow(loader))

    by_batch = list(zip(*run_on_ranks(size, body), strict=True))
    for ranks in by_batch:
        assert all(its_state == ranks[0][1] for _, its_state in ranks)
    return [[at for share, _ in ranks for at in share] for ranks in by_batch], [ranks[0][1] for ranks in by_batch]


def check_the_rest_follows(before: int, after: int, num_examples: int, batch: int, at: int) -> None:
    """Saved on `before` ranks while batch `at` is out, a loader goes on on `after` ranks with the next one."""
    batches, states = run(before, num_examples, batch)
    at %= len(batches)
    rest, states_then = run(after, num_examples, batch, states[at])
    assert rest == batches[at + 1 :]
    assert states_then == states[at + 1 :]


@pytest.mark.parametrize("at", range(2 * 6))
def test_after_every_batch_exactly_the_rest_follows(at: int) -> None:
    check_the_rest_follows(2, 2, num_examples=43, batch=8, at=at)


@settings(deadline=None, max_examples=25)
@given(
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    num_examples=st.integers(1, 25),
    batch=st.integers(1, 30),
    at=st.integers(0, 50),
)
def test_it_does_on_another_number_of_ranks(before: int, after: int, num_examples: int, batch: int, at: int) -> None:
    check_the_rest_follows(before, after, num_examples, batch, at)


def test_the_state_is_one_integer() -> None:
    _, states = run(3, num_examples=10, batch=4)
    assert states == [{"samples": samples} for samples in (4, 8, 10, 14, 18, 20)]


def test_share_is_right_after_a_state_is_loaded() -> None:
    def body(comm: Communicator) -> None:
        loader = create(comm, 43, 8)
        loader.load_state_dict({"samples": 43 + 24})
        for at, share in enumerate(loader, 3):
            assert loader.share == loader.dealer.share(at)
            assert loader.share.sizes[comm.rank] == len(share)
        assert loader.samples == 86

    run_on_ranks(3, body)


def test_a_loaded_epoch_can_be_left_early_too() -> None:
    def body(comm: Communicator) -> list[int]:
        loader = create(comm, 10, 4)
        loader.load_state_dict({"samples": 4})
        next(iter(loader))
        return [loader.samples, next(iter(loader)).tolist()]

    samples, first_of_next_epoch = run_on_ranks(1, body)[0]
    assert samples == 8
    assert first_of_next_epoch == run(1, 10, 4)[0][3]


def test_a_position_where_no_batch_begins_is_refused() -> None:
    def body(comm: Communicator) -> None:
        loader = create(comm, 43, 8)
        with pytest.raises(UsageError, match="sample 10 of an epoch of 43, where no batch of 8 begins"):
            loader.load_state_dict({"samples": 43 + 10})
        assert loader.samples == 0

    run_on_ranks(2, body)


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_a_position_that_is_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.deal
    monkeypatch.setattr(
        Dealer, "deal", lambda self, rank, epoch, start=0: honest(self, rank, epoch, start + (start > 0))
    )
    with pytest.raises(AssertionError):
        check_the_rest_follows(1, 1, num_examples=43, batch=8, at=2)


def test_red_twin_a_resume_that_is_one_batch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DataLoader.load_state_dict

    def one_batch_on(self: DataLoader, state_dict: State) -> None:
        honest(self, {"samples": state_dict["samples"] + 8})

    monkeypatch.setattr(DataLoader, "load_state_dict", one_batch_on)
    with pytest.raises(AssertionError):
        check_the_rest_follows(2, 2, num_examples=43, batch=8, at=2)


def test_red_twin_a_resume_that_begins_the_epoch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DataLoader.load_state_dict

    def from_the_start(self: DataLoader, state_dict: State) -> None:
        honest(self, {"samples": state_dict["samples"] // 43 * 43})

    monkeypatch.setattr(DataLoader, "load_state_dict", from_the_start)
    with pytest.raises(AssertionError):
        check_the_rest_follows(1, 2, num_examples=43, batch=8, at=2)


def test_red_twin_a_position_counted_by_each_rank_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DataLoader.state_dict
    monkeypatch.setattr(DataLoader, "state_dict", lambda self: {"samples": honest(self)["samples"] - self.comm.rank})
    with pytest.raises(AssertionError):
        run(2, num_examples=10, batch=4)
