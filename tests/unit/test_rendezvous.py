"""Meeting at rank 0's address: everybody comes, or everybody who came is told why not. Ranks are threads here."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from meeting import HANG, STORE_PORT, assemble, environment, host, join, together
from renkei.errors import LaunchError, PeerLostError
from renkei.launch import rendezvous


def check_all_told(outcomes: list[Any], *words: str) -> None:
    """All failed for one reason, and were told it."""
    for outcome in outcomes:
        assert isinstance(outcome, LaunchError)
        for word in words:
            assert word in str(outcome)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_who_come_learn_the_port_of_the_store(size: int) -> None:
    others = list(range(1, size))
    assert assemble(size, [(rank, size) for rank in others]) == [others] + [STORE_PORT] * (size - 1)


def test_the_others_may_come_before_rank_0() -> None:
    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        place = environment(0, 2, reservation.getsockname()[1])

        def late() -> list[int]:
            time.sleep(0.3)
            reservation.listen()
            return host(place, reservation)

        assert together(late, lambda: join(environment(1, 2, place.port or 0))) == [[1], STORE_PORT]


def test_a_missing_rank_is_named_to_all_who_came() -> None:
    check_all_told(assemble(4, [(1, 4), (3, 4)], timeout=0.3), "rank 2 had not come", "0.3 s")
    check_all_told(assemble(4, [(2, 4)], timeout=0.3), "ranks 1, 3 had not come")
    check_all_told(assemble(29, [(1, 29)], timeout=0.2), "ranks 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... had not come")


def check_who_came_early_waits_for_rank_0() -> None:
    """Rank 0 comes when most of rank 1's time has gone, rank 2 never: both then say the same, at rank 0's deadline."""
    timeout = 0.7
    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        place = environment(0, 3, reservation.getsockname()[1])

        def late() -> None:
            time.sleep(0.4)
            reservation.listen()
            host(place, reservation, timeout)

        check_all_told(together(late, lambda: join(environment(1, 3, place.port or 0), timeout)), "rank 2 had not come")


def test_a_missing_rank_is_named_to_who_came_long_before_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.2)
    check_who_came_early_waits_for_rank_0()


def test_red_twin_who_came_early_keeps_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.2)
    whole = rendezvous._next
    monkeypatch.setattr(rendezvous, "_next", lambda lines, to, timeout: whole(lines, to, min(timeout, 0.3)))
    with pytest.raises(AssertionError):
        check_who_came_early_waits_for_rank_0()


def test_a_rank_that_comes_twice_is_told_to_all_who_came() -> None:
    outcomes = assemble(3, [(1, 3), (1, 3)])
    check_all_told(outcomes, "rank 1 of 3", "each once", "RANK", "WORLD_SIZE")


@pytest.mark.parametrize("guest", [(1, 4), (1, 2), (3, 3), (0, 3), (-1, 3)])
def test_a_rank_of_another_job_is_told_to_all_who_came(guest: tuple[int, int]) -> None:
    rank, size = guest
    check_all_told(assemble(3, [guest], timeout=5), f"rank {rank} of {size}", "3 ranks", "RANK", "WORLD_SIZE")


def test_a_rank_that_ends_before_all_have_come_ends_the_wait() -> None:
    with rendezvous.open_listener("127.0.0.1", 0) as listener:
        place = environment(0, 4, listener.getsockname()[1])

        def leave() -> None:
            with socket.create_connection(("127.0.0.1", place.port)) as connection:
                connection.sendall(b'{"rank": 2, "size": 4}\n')
                connection.recv(100)
                time.sleep(0.1)

        def wait() -> None:
            with listener:
                host(place, listener)

        begin = time.monotonic()
        outcomes = together(wait, lambda: join(environment(1, 4, place.port or 0)), leave)
    assert time.monotonic() - begin < HANG / 2
    for rank, outcome in enumerate(outcomes[:2]):
        assert isinstance(outcome, PeerLostError)
        assert str(outcome) == f"rank {rank}: rank 2 ended before all ranks had come"


# -- red twins --------------------------------------------------------------------------------------------------------


def test_red_twin_the_reason_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_say", lambda connection, **message: None)
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.3)
    with pytest.raises(AssertionError):
        check_all_told(assemble(3, [(1, 3)], timeout=0.3), "rank 2 had not come")


def test_red_twin_a_rank_may_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rendezvous._welcome

    def forgetful(hello: bytes, connection: Any, environment: Any, guests: dict[int, Any]) -> int | None:
        rank = whole(hello, connection, environment, {})
        if rank is not None:
            guests[rank] = connection
        return rank

    monkeypatch.setattr(rendezvous, "_welcome", forgetful)
    with pytest.raises(AssertionError):
        check_all_told(assemble(3, [(1, 3), (1, 3)], timeout=0.3), "each once")
