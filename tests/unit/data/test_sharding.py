"""Every sample is dealt exactly once an epoch, and a batch has the same samples whatever the number of ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renkei.data import sharding
from renkei.data.sharding import Dealer, Indices, Share, permutation, shard_range

DEALERS = st.builds(
    Dealer,
    num_examples=st.integers(1, 60),
    global_batch_size=st.integers(1, 80),
    num_ranks=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    fixed=st.booleans(),
)
EPOCHS = st.integers(0, 3)
AWKWARD = Dealer(num_examples=359, global_batch_size=16, num_ranks=3, shuffle=True, seed=1)


def shares_of_batches(dealer: Dealer, epoch: int) -> list[list[Indices]]:
    """For each batch, what each rank gets."""
    by_rank = [list(dealer.deal(rank, epoch)) for rank in range(dealer.num_ranks)]
    return [list(shares) for shares in zip(*by_rank, strict=True)]


# -- the checks ---------------------------------------------------------------------------------------------------


def check_each_sample_is_dealt_once(dealer: Dealer, epoch: int) -> None:
    dealt = np.concatenate([share for shares in shares_of_batches(dealer, epoch) for share in shares])
    assert sorted(dealt.tolist()) == list(range(dealer.num_examples))


def check_batches_are_slices_of_the_order(dealer: Dealer, epoch: int) -> None:
    """The shares of a batch, in the order of ranks, are a slice of what one rank alone would go through."""
    order = replace(dealer, num_ranks=1).order(epoch)
    batches = shares_of_batches(dealer, epoch)
    size = dealer.global_batch_size
    assert len(batches) == dealer.batches_per_epoch
    for at, shares in enumerate(batches):
        assert np.concatenate(shares).tolist() == order[at * size : (at + 1) * size].tolist()


def check_shares_tell_the_truth(dealer: Dealer, epoch: int) -> None:
    batches = shares_of_batches(dealer, epoch)
    extremes = [(min(map(len, shares)), max(map(len, shares))) for shares in batches]
    uneven = [(fewest, most) for fewest, most in extremes if fewest != most]
    for at, shares in enumerate(batches):
        sizes = tuple(map(len, shares))
        assert dealer.share(at) == Share(sizes, next(iter(uneven), None))
        assert max(sizes) - min(sizes) <= 1


def check_going_on_gives_the_rest(dealer: Dealer, epoch: int, batch: int) -> None:
    for rank in range(dealer.num_ranks):
        whole = [share.tolist() for share in dealer.deal(rank, epoch)]
        rest = [share.tolist() for share in dealer.deal(rank, epoch, start=batch * dealer.global_batch_size)]
        assert rest == whole[batch:]


def check_ranks_keep_their_samples(dealer: Dealer) -> None:
    """What `fixed` promises: each rank has the same samples in all epochs, no two ranks the same one."""
    for rank in range(dealer.num_ranks):
        first, *later = ({int(at) for share in dealer.deal(rank, epoch) for at in share} for epoch in range(4))
        assert all(samples == first for samples in later)


# -- and that they hold -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(DEALERS, EPOCHS)
def test_each_sample_is_dealt_exactly_once_in_an_epoch(dealer: Dealer, epoch: int) -> None:
    check_each_sample_is_dealt_once(dealer, epoch)


@settings(deadline=None)
@given(DEALERS.filter(lambda dealer: not dealer.fixed), EPOCHS)
def test_a_batch_is_the_same_slice_whatever_the_number_of_ranks(dealer: Dealer, epoch: int) -> None:
    check_batches_are_slices_of_the_order(dealer, epoch)


@settings(deadline=None)
@given(DEALERS, EPOCHS)
def test_sizes_differ_by_at_most_one_and_are_what_share_says(dealer: Dealer, epoch: int) -> None:
    check_shares_tell_the_truth(dealer, epoch)


@settings(deadline=None)
@given(DEALERS, EPOCHS, st.data())
def test_dealing_goes_on_at_any_batch(dealer: Dealer, epoch: int, data: st.DataObject) -> None:
    check_going_on_gives_the_rest(dealer, epoch, data.draw(st.integers(0, dealer.batches_per_epoch)))


@settings(deadline=None)
@given(DEALERS)
def test_with_fixed_each_rank_keeps_its_samples(dealer: Dealer) -> None:
    fixed = replace(dealer, fixed=True)
    check_ranks_keep_their_samples(fixed)
    check_each_sample_is_dealt_once(fixed, epoch=3)


def test_with_fixed_the_order_is_another_in_each_epoch() -> None:
    dealer = replace(AWKWARD, fixed=True)
    orders = {dealer.order(epoch).tobytes() for epoch in range(5)}
    assert len(orders) == 5


def test_without_shuffle_the_order_is_the_datasets() -> None:
    dealer = replace(AWKWARD, shuffle=False)
    assert dealer.order(epoch=2).tolist() == list(range(359))
    assert next(dealer.deal(1, epoch=2)).tolist() == [6, 7, 8, 9, 10]


# -- the order, by heart ------------------------------------------------------------------------------------------

# Whoever changes one of these numbers changes what every recorded run was trained on.
GOLDEN = {
    (10, 0, 0): [8, 0, 3, 7, 6, 4, 1, 5, 2, 9],
    (10, 0, 1): [1, 5, 6, 4, 8, 7, 9, 3, 2, 0],
    (10, 1, 0): [6, 2, 1, 0, 8, 4, 3, 9, 7, 5],
    (7, 2**40, 3): [4, 6, 5, 2, 0, 3, 1],
    (1, 0, 0): [0],
}


@pytest.mark.parametrize(("num_examples", "seed", "epoch"), GOLDEN)
def test_the_order_of_an_epoch_is_what_it_always_was(num_examples: int, seed: int, epoch: int) -> None:
    order = permutation(num_examples, seed=seed, epoch=epoch)
    assert order.tolist() == GOLDEN[num_examples, seed, epoch]
    assert order.dtype == np.int64


def test_the_order_of_the_digits_is_what_it_always_was() -> None:
    order = permutation(1797, seed=0, epoch=5).astype("<i8").tobytes()
    assert hashlib.sha256(order).hexdigest() == "d9372691efdf989fbacb0e53d1a554df5e2a21fc1c336eff7702efd29b8b54ea"


# -- one range for each rank --------------------------------------------------------------------------------------

SIZES = [(10, 3), (1244, 23), (2, 1), (230945, 237), (3, 7), (0, 4), (1, 1)]


def test_the_ranges_of_ten_samples_on_three_ranks() -> None:
    ranges = [shard_range(10, rank=rank, size=3) for rank in range(3)]
    assert ranges == [range(0, 4), range(4, 7), range(7, 10)]
    equal = [shard_range(10, rank=rank, size=3, equal=True) for rank in range(3)]
    assert equal == [range(0, 4), range(3, 7), range(6, 10)]


@pytest.mark.parametrize(("num_examples", "size"), SIZES)
def test_ranges_follow_one_another_and_cover_everything(num_examples: int, size: int) -> None:
    ranges = [shard_range(num_examples, rank=rank, size=size) for rank in range(size)]
    assert [at for own in ranges for at in own] == list(range(num_examples))
    assert len({len(own) for own in ranges}) <= 2
    assert [len(own) for own in ranges] == sorted((len(own) for own in ranges), reverse=True)
    assert len(ranges[0]) - len(ranges[-1]) <= 1


@pytest.mark.parametrize(("num_examples", "size"), SIZES)
def test_equal_ranges_have_one_length_and_cover_everything(num_examples: int, size: int) -> None:
    ranges = [shard_range(num_examples, rank=rank, size=size, equal=True) for rank in range(size)]
    assert {len(own) for own in ranges} == {-(-num_examples // size)}
    assert {at for own in ranges for at in own} == set(range(num_examples))
    assert ranges[0].start == 0
    assert ranges[-1].stop == num_examples


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_a_sample_twice_at_the_edge_of_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = shard_range

    def overlapping(num_examples: int, *, rank: int, size: int) -> range:
        own = honest(num_examples, rank=rank, size=size)
        return range(max(0, own.start - 1), own.stop)

    check_each_sample_is_dealt_once(AWKWARD, epoch=1)
    monkeypatch.setattr(sharding, "shard_range", overlapping)
    with pytest.raises(AssertionError):
        check_each_sample_is_dealt_once(AWKWARD, epoch=1)


def test_red_twin_an_order_that_depends_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.order
    check_batches_are_slices_of_the_order(AWKWARD, epoch=1)
    monkeypatch.setattr(Dealer, "order", lambda self, epoch: np.roll(honest(self, epoch), self.num_ranks))
    check_each_sample_is_dealt_once(AWKWARD, epoch=1)
    with pytest.raises(AssertionError):
        check_batches_are_slices_of_the_order(AWKWARD, epoch=1)


def test_red_twin_shares_that_are_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.share
    check_shares_tell_the_truth(AWKWARD, epoch=0)
    monkeypatch.setattr(Dealer, "share", lambda self, batch: replace(honest(self, batch), uneven=None))
    with pytest.raises(AssertionError):
        check_shares_tell_the_truth(AWKWARD, epoch=0)


def test_red_twin_going_on_one_batch_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dealer.deal
    check_going_on_gives_the_rest(AWKWARD, epoch=0, batch=3)
    monkeypatch.setattr(
        Dealer, "deal", lambda self, rank, epoch, start=0: honest(self, rank, epoch, start + 16 * (start > 0))
    )
    with pytest.raises(AssertionError):
        check_going_on_gives_the_rest(AWKWARD, epoch=0, batch=3)


def test_red_twin_fixed_samples_that_are_dealt_anew() -> None:
    check_ranks_keep_their_samples(replace(AWKWARD, fixed=True))
    with pytest.raises(AssertionError):
        check_ranks_keep_their_samples(AWKWARD)
