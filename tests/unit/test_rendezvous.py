"""Meeting at rank 0's address: everybody comes, or everybody who came is told why not. Ranks are threads here."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from renkei.errors import LaunchError, PeerLostError, RenkeiError
from renkei.launch import rendezvous
from renkei.launch.environments import LaunchEnvironment

STORE_PORT = 4321
HANG = 15.0


def environment(rank: int, size: int, port: int) -> LaunchEnvironment:
    source = ("RANK", "WORLD_SIZE")
    return LaunchEnvironment("variables", rank, size, None, None, None, "127.0.0.1", port, source)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls, made at the same time, return or raise."""
    outcomes: list[Any] = [None] * len(calls)

    def body(at: int) -> None:
        try:
            outcomes[at] = calls[at]()
        except RenkeiError as error:
            outcomes[at] = error

    threads = [threading.Thread(target=body, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def assemble(size: int, guests: list[tuple[int, int]], timeout: float = HANG) -> list[Any]:
    """The outcomes of rank 0 of `size` and of guests that say they are a rank of a size."""
    with rendezvous.open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        def host() -> None:
            with listener:
                rendezvous.host(environment(0, size, port), listener, STORE_PORT, timeout)

        def join(rank: int, its_size: int) -> int:
            return rendezvous.join(environment(rank, its_size, port), timeout)

        return together(host, *(lambda guest=guest: join(*guest) for guest in guests))


def check_all_told(outcomes: list[Any], *words: str) -> None:
    """All failed for one reason, and were told it."""
    for outcome in outcomes:
        assert isinstance(outcome, LaunchError)
        for word in words:
            assert word in str(outcome)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_who_come_learn_the_port_of_the_store(size: int) -> None:
    assert assemble(size, [(rank, size) for rank in range(1, size)]) == [None] + [STORE_PORT] * (size - 1)


def test_the_others_may_come_before_rank_0() -> None:
    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        place = environment(0, 2, reservation.getsockname()[1])

        def late() -> None:
            time.sleep(0.3)
            reservation.listen()
            rendezvous.host(place, reservation, STORE_PORT, HANG)

        assert together(late, lambda: rendezvous.join(environment(1, 2, place.port or 0), HANG)) == [None, STORE_PORT]


def test_a_missing_rank_is_named_to_all_who_came() -> None:
    check_all_told(assemble(4, [(1, 4), (3, 4)], timeout=0.3), "rank 2 had not come", "0.3 s")
    check_all_told(assemble(4, [(2, 4)], timeout=0.3), "ranks 1, 3 had not come")
    check_all_told(assemble(29, [(1, 29)], timeout=0.2), "ranks 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... had not come")


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

        def host() -> None:
            with listener:
                rendezvous.host(place, listener, STORE_PORT, HANG)

        begin = time.monotonic()
        outcomes = together(host, lambda: rendezvous.join(environment(1, 4, place.port or 0), HANG), leave)
    assert time.monotonic() - begin < HANG / 2
    assert isinstance(outcomes[0], PeerLostError)
    assert "rank 2 ended" in str(outcomes[0])
    assert isinstance(outcomes[1], PeerLostError)


# -- strangers ----------------------------------------------------------------------------------------------------


@contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """Somebody else's server; yields its port. It sends `answer` and hangs up; with None it never answers."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with ExitStack() as stack:
                try:
                    connection = stack.enter_context(listener.accept()[0])
                except TimeoutError:
                    continue
                if answer is None:
                    ended.wait(HANG)
                else:
                    connection.sendall(answer)
                    connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join()


ANSWERS = {
    "never": None, "nothing": b"", "http": b"HTTP/1.1 400 Bad Request\r\n\r\n", "bytes": b"\xff\xfe\x00\n",
    "number": b"12\n", "null": b"null\n", "list": b"[]\n", "depth": b"[" * 5000 + b"\n",
    "job of another size": b'{"welcome": 3}\n', "line without end": b"x" * 70000,
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_who_meets_a_stranger_says_so(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.3)
    with (
        stranger(answer) as port,
        pytest.raises(LaunchError, match=rf"rank 1: what listens at 127.0.0.1:{port} is not"),
    ):
        rendezvous.join(environment(1, 2, port), HANG)


def test_a_rank_whose_rank_0_ends_before_all_came_says_so() -> None:
    with stranger(b'{"welcome": 2}\n') as port, pytest.raises(PeerLostError, match="rank 1: rank 0 ended before"):
        rendezvous.join(environment(1, 2, port), HANG)


def test_who_meets_nobody_says_so_at_the_deadline() -> None:
    with socket.socket() as reservation:  # bound, and so no one else's, but not listening
        reservation.bind(("127.0.0.1", 0))
        port = reservation.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 1 can't reach rank 0 at 127.0.0.1:{port}: .*MASTER_ADDR"):
            rendezvous.join(environment(1, 2, port), 0.3)


def scan(port: int, stack: ExitStack) -> None:
    """What a port scan, a health check or a browser does to whoever listens."""
    hellos = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\n", b"[1, 2]\n", b"3\n", b'{"rank": 1}\n', b"[" * 5000 + b"\n",
              b'{"rank": "1", "size": "2"}\n', b'{"rank": [1], "size": 3}\n', b'{"rank": true, "size": 3}\n',
              b'{"rank": null, "size": null}\n', b"x" * 70000, b'{"rank": 1, "size"']  # fmt: skip
    for hello in hellos:
        with socket.create_connection(("127.0.0.1", port)) as gone_again:
            gone_again.sendall(hello)
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        silent.sendall(hello)


def check_scan_does_not_matter() -> None:
    """Whatever strangers do, the ranks come together as soon as they are there."""
    with ExitStack() as stack, rendezvous.open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        begin = time.monotonic()
        outcomes = together(
            lambda: rendezvous.host(environment(0, 3, port), listener, STORE_PORT, HANG),
            lambda: scan(port, stack),
            lambda: [time.sleep(0.2), rendezvous.join(environment(1, 3, port), HANG)][1],
            lambda: [time.sleep(0.3), scan(port, stack), rendezvous.join(environment(2, 3, port), HANG)][2],
        )
    assert outcomes == [None, None, STORE_PORT, STORE_PORT]
    assert time.monotonic() - begin < 5


def test_a_port_scan_does_not_matter() -> None:
    check_scan_does_not_matter()


# -- sockets ------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with stranger(None) as port, pytest.raises(LaunchError, match=rf"127.0.0.1:{port}: .*MASTER_PORT"):
        rendezvous.open_listener("127.0.0.1", port)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("10.0.0.1", False), ("n1", False)],
)
def test_what_is_loopback(address: str, expected: bool) -> None:
    assert rendezvous.is_loopback(address) == expected


def test_a_job_on_one_host_listens_on_loopback_only() -> None:
    with rendezvous.open_listener("127.0.0.1", 0) as inside, rendezvous.open_listener("10.0.0.1", 0) as outside:
        assert inside.getsockname()[0] == "127.0.0.1"
        assert outside.getsockname()[0] in ("::", "0.0.0.0")


def test_rank_0_takes_the_socket_its_launcher_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous.inherited_listener() is None
    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        monkeypatch.setenv(rendezvous.LISTENER_VARIABLE, str(os.dup(reservation.fileno())))
        with rendezvous.inherited_listener() as listener:
            socket.create_connection(reservation.getsockname()).close()
            assert listener.getsockname() == reservation.getsockname()
    assert rendezvous.LISTENER_VARIABLE not in os.environ  # a process started from here has no such descriptor


# -- red twins ----------------------------------------------------------------------------------------------------


def test_red_twin_the_reason_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_say", lambda connection, **message: None)
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.3)
    with pytest.raises(AssertionError):
        check_all_told(assemble(3, [(1, 3)], timeout=0.3), "rank 2 had not come")


def test_red_twin_strangers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = rendezvous._hear

    def wait(key: Any, *others: Any) -> None:
        time.sleep(1.0)
        patient(key, *others)

    monkeypatch.setattr(rendezvous, "_hear", wait)
    with pytest.raises(AssertionError):
        check_scan_does_not_matter()


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
