"""Somebody else at rank 0's address, or knocking at it, and the sockets on which ranks meet."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from meeting import HANG, STORE_PORT, environment, host, join, together
from renkei.errors import LaunchError, PeerLostError
from renkei.launch import rendezvous


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
        join(environment(1, 2, port))


def test_a_rank_whose_rank_0_ends_before_all_came_says_so() -> None:
    with stranger(b'{"welcome": 2}\n') as port, pytest.raises(PeerLostError, match="rank 1: rank 0 ended before"):
        join(environment(1, 2, port))


def test_a_rank_whose_rank_0_falls_silent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            connection = listener.accept()[0]
            connection.sendall(b'{"welcome": 2}\n')
            with connection:
                connection.recv(100)
                connection.recv(100)  # until the other end has gone

        place = environment(1, 2, listener.getsockname()[1])
        _, outcome = together(welcome, lambda: join(place, 0.3))
    assert isinstance(outcome, LaunchError)
    assert "rank 1: rank 0 at 127.0.0.1" in str(outcome)
    assert "has not said for 0.4 s" in str(outcome)


def test_who_meets_nobody_says_so_at_the_deadline() -> None:
    with socket.socket() as reservation:  # bound, and so no one else's, but not listening
        reservation.bind(("127.0.0.1", 0))
        port = reservation.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 1 can't reach rank 0 at 127.0.0.1:{port}: .*MASTER_ADDR"):
            join(environment(1, 2, port), 0.3)


def check_no_rank_meets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that TCP makes from a port to itself, where nobody listens, is not taken for one to somebody."""
    real = socket.create_connection
    ends: list[socket.socket] = []
    tries = []

    def to_itself(place: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(place)
        ends.append(real(place, timeout, source_address=place))
        assert ends[-1].getsockname() == ends[-1].getpeername()
        return ends[-1]

    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        port = reservation.getsockname()[1]
    monkeypatch.setattr(socket, "create_connection", to_itself)
    try:
        with pytest.raises(LaunchError) as caught:
            join(environment(1, 2, port), 0.2)
        assert "can't reach rank 0" in str(caught.value)
        assert "is rank 0 running" in str(caught.value)
        assert len(tries) > 1  # it went on
        assert ends
        assert all(end.fileno() == -1 for end in ends)
    finally:
        for end in ends:
            end.close()


def test_no_rank_meets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_rank_meets_itself(monkeypatch)


def test_red_twin_a_rank_meets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.2)
    monkeypatch.setattr(
        rendezvous, "_connect", lambda place, *_: socket.create_connection((place.address, place.port), 1)
    )
    with pytest.raises(AssertionError):
        check_no_rank_meets_itself(monkeypatch)


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


def check_scan_does_not_matter(within: float = 5.0) -> None:
    """Whatever strangers do, the ranks come together as soon as they are there."""
    with ExitStack() as stack, rendezvous.open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        begin = time.monotonic()
        outcomes = together(
            lambda: host(environment(0, 3, port), listener, within),
            lambda: scan(port, stack),
            lambda: [time.sleep(0.2), join(environment(1, 3, port), within)][1],
            lambda: [time.sleep(0.3), scan(port, stack), join(environment(2, 3, port), within)][2],
        )
    assert outcomes == [[1, 2], None, STORE_PORT, STORE_PORT]
    assert time.monotonic() - begin < within


def test_a_port_scan_does_not_matter() -> None:
    check_scan_does_not_matter()


def test_red_twin_strangers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = rendezvous._hear

    def wait(key: Any, *others: Any) -> None:
        time.sleep(0.1)
        patient(key, *others)

    monkeypatch.setattr(rendezvous, "_hear", wait)
    monkeypatch.setattr(rendezvous, "_WELCOME_WITHIN", 0.5)
    with pytest.raises(AssertionError):
        check_scan_does_not_matter(within=1.5)


# -- sockets ------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with (
        stranger(None) as port,
        pytest.raises(
            LaunchError, match=f"port {port} of 127.0.0.1: Address already in use; choose another MASTER_PORT"
        ),
    ):
        rendezvous.open_listener("127.0.0.1", port)


@pytest.mark.parametrize(
    ("number", "port", "is_about_port"),
    [(errno.EACCES, 80, True), (errno.EMFILE, 80, False), (errno.EADDRINUSE, 0, False), (errno.EAFNOSUPPORT, 0, False)],
)
def test_another_port_is_only_asked_for_where_it_helps(
    number: int, port: int, is_about_port: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, "a long story")

    monkeypatch.setattr(socket, "create_server", fail)
    for address in ("127.0.0.1", "10.0.0.1"):
        with pytest.raises(LaunchError, match=os.strerror(number)) as caught:
            rendezvous.open_listener(address, port)
        assert ("MASTER_PORT" in str(caught.value)) == is_about_port


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
