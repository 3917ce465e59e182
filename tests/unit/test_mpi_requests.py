"""How long a rank waits for MPI, how often it asks, and of whom it gives up hope."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from processes import eventually
from renkei.communicators.backends.mpi import farewells
from renkei.communicators.backends.mpi import requests as requests_module
from renkei.communicators.backends.mpi.farewells import Farewells
from renkei.communicators.backends.mpi.requests import Request, Requests
from renkei.errors import DeadlineError, MismatchError, PeerLostError, RenkeiError


class MpiError(RuntimeError):
    """As mpi4py raises them."""

    def Get_error_class(self) -> int:
        return 15

    def Get_error_string(self) -> str:
        return "truncated"


class Took:
    """A request of MPI that is done after so many seconds."""

    def __init__(self, seconds: float, computing: float = 0.0, error: Exception | None = None) -> None:
        self._end = time.monotonic() + seconds
        self._computing, self._error = computing, error
        self.is_cancelled = False

    def Test(self, status: object = None) -> bool:
        end = time.thread_time() + self._computing
        while time.thread_time() < end:
            pass
        if self._error is not None:
            raise self._error
        return self.is_cancelled or time.monotonic() > self._end

    def Cancel(self) -> None:
        self.is_cancelled = True


MPI = SimpleNamespace(Exception=MpiError, ERR_TRUNCATE=15)


def farewells_of(size: int) -> list[Farewells]:
    store = dist.HashStore()
    return [Farewells(store, "group", rank, size) for rank in range(size)]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Of rank 0 of 2; rank 1 has left."""
    monkeypatch.setattr(farewells, "_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(requests_module, "_GRACE", 0.1)
    first, second = farewells_of(2)
    second.leave(3)
    created = Requests(MPI, 0, first)
    yield created
    created.give_up(RenkeiError("closed"))
    created.close()


def nobody(left: Mapping[int, int]) -> None:
    return None


def request(requests: Requests, took: Took, find_lost: Callable[..., int | None] = nobody, **options: Any) -> Request:
    return Request(requests, took, "memory", "all_reduce", find_lost, **options)


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.05])
def test_what_comes_in_time_is_finished_once(requests: Requests, seconds: float) -> None:
    finish = mock.Mock()
    pending = request(requests, Took(seconds), finish=finish)
    pending.wait(10)
    pending.wait(10)
    finish.assert_called_once_with()


def test_what_nobody_waits_for_moves_on_too(requests: Requests) -> None:
    pending, called = request(requests, Took(0.05)), mock.Mock()
    pending.when_done(called)
    assert eventually(lambda: pending.is_done)
    called.assert_called_once_with()


def test_a_deadline_says_who_waited_how_long_in_what_and_ends_nothing(requests: Requests) -> None:
    pending = request(requests, Took(0.3))
    with pytest.raises(DeadlineError, match=r"rank 0 waited 0\.05 s for other ranks in all_reduce: timed out"):
        pending.wait(0.05)
    pending.wait(10)


@pytest.mark.parametrize("waits", [True, False])
def test_a_limit_ends_it_whoever_waits(requests: Requests, waits: bool) -> None:
    pending = request(requests, Took(10), limit=0.05)
    if waits:
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s"):
            pending.wait(10)
    assert eventually(lambda: pending.is_done)
    assert isinstance(pending.error, DeadlineError)


def test_a_limit_holds_though_something_seems_to_move_all_the_time(requests: Requests) -> None:
    with pytest.raises(DeadlineError):
        request(requests, Took(10, computing=0.0001), limit=0.05).wait(10)


def test_an_idle_wait_does_not_keep_the_processor(requests: Requests) -> None:
    used = time.thread_time()
    request(requests, Took(0.5)).wait(10)
    assert time.thread_time() - used < 0.25


def test_a_rank_that_is_needed_and_has_left_is_named(requests: Requests) -> None:
    pending = request(requests, Took(10), lambda left: 1 if 1 in left else None)
    with pytest.raises(PeerLostError, match="rank 0 lost rank 1 in all_reduce"):
        pending.wait(10)


def test_what_a_rank_sent_before_it_left_still_comes(requests: Requests) -> None:
    request(requests, Took(0.03), lambda left: 1).wait(10)


def test_errors_of_mpi_and_of_finishing_are_told(requests: Requests) -> None:
    with pytest.raises(MismatchError, match="rank 0: all_reduce: more came"):
        request(requests, Took(0, error=MpiError())).wait(10)
    with pytest.raises(ZeroDivisionError):
        request(requests, Took(0), finish=lambda: 1 / 0).wait(10)


def test_what_is_given_up_is_cancelled_if_that_can_be_and_else_kept(requests: Requests) -> None:
    with mock.patch.object(requests_module, "keep_for_ever") as kept:
        received, sum_ = request(requests, Took(10), status=object()), request(requests, Took(10))
        assert received.give_up(RenkeiError("closed"))
        assert not sum_.give_up(RenkeiError("closed"))
        kept.assert_called_once_with(mock.ANY, "memory")
    for pending in (received, sum_):
        with pytest.raises(RenkeiError, match="closed"):
            pending.wait(10)


def test_what_is_kept_for_ever_is_never_freed() -> None:
    class Kept:
        pass

    kept = Kept()
    reference = weakref.ref(kept)
    requests_module.keep_for_ever(kept)
    del kept
    gc.collect()
    assert reference() is not None


def looked(own: Farewells) -> dict[int, int]:
    """What a rank knows once the store has answered."""
    own.look()
    own._await_answer()
    return dict(own.look())


def test_who_has_left_is_known_with_the_number_of_its_collectives() -> None:
    with mock.patch.object(farewells, "_BETWEEN_LOOKS", 0.0):
        first, second, third = farewells_of(3)
        assert looked(first) == {}
        third.leave(7)
        assert looked(first) == {2: 7}
        second.leave(0)
        assert looked(first) == {1: 0, 2: 7}
        third.leave(9)  # says nothing more
        assert looked(first) == {1: 0, 2: 7}


def test_a_store_that_does_not_answer_keeps_nobody() -> None:
    first, _ = farewells_of(2)
    first._store, answers = mock.Mock(), threading.Event()
    first._store.add.side_effect = lambda *_: int(not answers.wait())
    begin = time.monotonic()
    assert first.look() == {}
    first.leave(3)
    assert time.monotonic() - begin < 5
    answers.set()


def test_a_store_that_has_gone_is_not_asked_again() -> None:
    with mock.patch.object(farewells, "_BETWEEN_LOOKS", 0.0):
        first, _ = farewells_of(2)
        first._store = broken = mock.Mock()
        broken.add.side_effect = RuntimeError("Broken pipe")
        assert looked(first) == looked(first) == {}
        assert broken.add.call_count == 1
        first.leave(1)
