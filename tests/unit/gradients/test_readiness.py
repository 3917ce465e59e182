from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renkei.gradients.readiness import Habits, LateGradientError, Learning, Readiness


@st.composite
def buckets(draw: st.DrawFn) -> list[list[int]]:
    """Some parameters, in any order, cut into buckets; the last may be empty, as one for the tail alone is."""
    parameters = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(parameters)), max_size=4)) | {len(parameters)})
    cut = [list(parameters[begin:end]) for begin, end in zip([0, *cuts], cuts, strict=False)]
    return cut + [[]] * draw(st.integers(0, 1))


class Naive:
    """What `Readiness` is to do, in the words of its docstring: everything counted anew at each announcement."""

    def __init__(self, buckets: Sequence[Sequence[int]], expected: Sequence[int]) -> None:
        self.buckets, self.expected = buckets, expected
        self.announced: list[int] = []
        self.left = 0

    def is_complete(self, parameter: int) -> bool:
        return self.announced.count(parameter) == self.expected[parameter]

    def announce(self, parameter: int) -> tuple[bool, list[int]]:
        self.announced.append(parameter)
        if not self.is_complete(parameter):
            return False, []
        leaving = []
        while self.left < len(self.buckets) and all(map(self.is_complete, self.buckets[self.left])):
            leaving.append(self.left)
            self.left += 1
        return True, leaving

    @property
    def may_be_all(self) -> bool:
        return all(self.is_complete(parameter) for bucket in self.buckets for parameter in bucket)


def check_like_naive(cut: Sequence[Sequence[int]], expected: Sequence[int], announcements: Sequence[int]) -> None:
    readiness, naive = Readiness(cut, expected), Naive(cut, expected)
    for exchange in range(2):
        for parameter in announcements:
            complete, may_leave = readiness.announce(parameter)
            assert (complete, list(may_leave)) == naive.announce(parameter), f"in exchange {exchange}"
            assert readiness.may_be_all == naive.may_be_all
        readiness.restart()
        naive = Naive(cut, expected)


@given(buckets(), st.data())
def test_it_does_what_counting_everything_anew_would(cut: list[list[int]], data: st.DataObject) -> None:
    num_parameters = sum(map(len, cut))
    expected = data.draw(st.lists(st.integers(1, 3), min_size=num_parameters, max_size=num_parameters))
    every = [parameter for parameter in range(num_parameters) for _ in range(expected[parameter])]
    announcements = data.draw(st.permutations(every))
    check_like_naive(cut, expected, announcements[: data.draw(st.integers(0, len(every)))])


@given(buckets())
def test_all_buckets_leave_once_and_in_order(cut: list[list[int]]) -> None:
    num_parameters = sum(map(len, cut))
    readiness = Readiness(cut, [1] * num_parameters)
    left = [bucket for parameter in range(num_parameters) for bucket in readiness.announce(parameter)[1]]
    assert left == list(range(len(cut)))


def test_red_twin_a_bucket_that_leaves_out_of_turn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def announce(self: Readiness, parameter: int) -> tuple[bool, range]:
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        return True, range(bucket, bucket + (not self._missing[bucket]))

    monkeypatch.setattr(Readiness, "announce", announce)
    with pytest.raises(AssertionError):
        check_like_naive([[0], [1]], [1, 1], [1, 0])


def test_red_twin_counts_that_survive_into_the_next_exchange_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readiness = Readiness([[0], [1]], [2, 1])
    monkeypatch.setattr(Readiness, "restart", lambda self: None)
    readiness.announce(0)
    readiness.restart()
    with pytest.raises(AssertionError):
        assert readiness.announce(0) == (False, range(0))


@pytest.mark.parametrize("has_left", [True, False])
def test_one_announcement_too_many_is_an_error_whether_or_not_the_bucket_has_left(has_left: bool) -> None:
    readiness = Readiness([[0], [1]] if has_left else [[1], [0]], [1, 1])
    assert list(readiness.announce(0)[1]) == ([0] if has_left else [])
    with pytest.raises(LateGradientError):
        readiness.announce(0)


def test_a_shared_parameter_is_complete_at_its_last_announcement() -> None:
    readiness = Readiness([[0, 1]], [2, 1])
    assert readiness.announce(0) == (False, range(0))
    assert readiness.announce(1) == (True, range(0))
    assert not readiness.may_be_all
    assert readiness.announce(0) == (True, range(1))
    assert readiness.may_be_all


# -- learning ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4)))
def test_learning_lets_no_bucket_leave(announcements: list[int]) -> None:
    learning = Learning(5)
    for parameter in announcements:
        assert learning.announce(parameter) == (False, range(0))
    assert learning.may_be_all


@given(st.lists(st.integers(0, 4)))
def test_what_is_learnt_is_what_was_seen(announcements: list[int]) -> None:
    learning = Learning(5)
    for parameter in announcements:
        learning.announce(parameter)
    habits = learning.learnt()
    assert habits.expected == tuple(max(1, announcements.count(parameter)) for parameter in range(5))
    assert sorted(habits.order) == list(range(5))
    by_last_announcement = sorted(set(announcements), key=lambda parameter: announcements[::-1].index(parameter))[::-1]
    assert list(habits.order[: len(by_last_announcement)]) == by_last_announcement


def test_parameters_never_seen_come_last_in_reverse() -> None:
    learning = Learning(5)
    learning.announce(2)
    assert learning.learnt().order == (2, 4, 3, 1, 0)


def test_the_busiest_of_several_backward_passes_counts() -> None:
    learning = Learning(2)
    for announcements in ([0, 1], [0, 0], [1]):
        for parameter in announcements:
            learning.announce(parameter)
        learning.end_of_backward()
    assert learning.learnt().expected == (2, 1)


def test_exchanges_within_a_backward_pass_are_counted_together() -> None:
    learning = Learning(1)
    learning.announce(0)
    learning.restart()
    learning.announce(0)
    assert learning.learnt().expected == (2,)


def test_ranks_agree_on_the_order_of_the_first_and_the_most_announcements_of_any() -> None:
    agreed = Habits.agreed([Habits((1, 2, 1), (2, 0, 1)), Habits((1, 1, 3), (0, 1, 2))])
    assert agreed == Habits((1, 2, 3), (2, 0, 1))
