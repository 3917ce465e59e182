"""Bringing the processes of a job together at rank 0's address, without waiting for a stranger or for ever.

Rank 0 listens at the address everyone knows; each other rank says who it is, is welcomed at once, and learns where
the job's store is once all have come. A rank that meets somebody else there, or nobody in time, says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from renkei.errors import LaunchError, PeerLostError
from renkei.launch.environments import LaunchEnvironment

_WELCOME_WITHIN = 5.0  # seconds in which rank 0 answers, once it listens
_LONGEST_MESSAGE = 65536  # bytes
_REPORT_EVERY = 10.0  # seconds after which rank 0 says for whom it waits
LISTENER_VARIABLE = "RENKEI_LISTEN_FD"


def open_listener(address: str, port: int) -> socket.socket:
    """A listening socket: on the loopback interface if that is where the job is, else on all interfaces.

    Raises:
        LaunchError: the port is in use or the address isn't this host's.
    """
    try:
        if is_loopback(address):
            return socket.create_server(("127.0.0.1", port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise LaunchError(
            f"rank 0 can't listen on {address}:{port}: {error.strerror}; choose another MASTER_PORT"
        ) from None


def is_loopback(address: str) -> bool:
    """Whether an address is only reachable on its own host."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


def host(environment: LaunchEnvironment, listener: socket.socket, store_port: int, timeout: float) -> None:
    """Rank 0's part: welcome the other ranks and, when all have come, tell them the store's port.

    Raises:
        LaunchError: some have not come in `timeout` seconds, or two say they are the same rank; told to all who came.
        PeerLostError: one that had come has ended.
    """
    begin = reported = time.monotonic()
    guests: dict[int, socket.socket] = {}
    listener.setblocking(False)
    with ExitStack() as stack, selectors.DefaultSelector() as ears:
        ears.register(listener, selectors.EVENT_READ)
        while len(guests) < environment.size - 1:
            waited = time.monotonic() - begin
            if waited > timeout:
                whom = _missing(environment, guests)
                _dismiss(guests.values(), f"{whom} had not come to rank 0 after {timeout:g} s; are they running?")
            if time.monotonic() - reported > _REPORT_EVERY:
                reported = time.monotonic()
                whom = _missing(environment, guests)
                print(f"renkei: rank 0 has waited {waited:.0f} s for {whom}", file=sys.stderr, flush=True)
            for key, _ in ears.select(min(1.0, max(0.01, timeout - waited))):
                if key.fileobj is listener:
                    _open_door(listener, ears, stack)
                else:
                    _hear(key, ears, environment, guests)
        for connection in guests.values():
            _say(connection, port=store_port)


def join(environment: LaunchEnvironment, timeout: float) -> int:
    """The part of every other rank: returns the port of the job's store on rank 0's host.

    Raises:
        LaunchError: nobody, or somebody else, is there; or rank 0 says that the job can't begin.
        PeerLostError: rank 0 ended before all had come.
    """
    assert environment.address is not None
    assert environment.port is not None
    place = f"{environment.address}:{environment.port}"
    deadline = time.monotonic() + timeout
    with _connect(environment, place, deadline) as connection:
        _say(connection, rank=environment.rank, size=environment.size)
        connection.settimeout(_WELCOME_WITHIN)
        answers = _lines(connection)
        if next(answers, None) != {"welcome": environment.size}:
            raise LaunchError(
                f"rank {environment.rank}: what listens at {place} is not rank 0 of this job; "
                "choose another MASTER_PORT"
            )
        connection.settimeout(max(1.0, deadline - time.monotonic()) + _WELCOME_WITHIN)
        answer = next(answers, None)
    if answer is None:
        raise PeerLostError(f"rank {environment.rank}: rank 0 ended before all ranks had come")
    if "error" in answer:
        raise LaunchError(f"rank {environment.rank}: {answer['error']}")
    return int(answer["port"])


def _open_door(listener: socket.socket, ears: selectors.BaseSelector, stack: ExitStack) -> None:
    with contextlib.suppress(OSError):  # who knocked has gone again
        connection = stack.enter_context(listener.accept()[0])
        connection.settimeout(_WELCOME_WITHIN)
        ears.register(connection, selectors.EVENT_READ, b"")


def _hear(
    key: selectors.SelectorKey,
    ears: selectors.BaseSelector,
    environment: LaunchEnvironment,
    guests: dict[int, socket.socket],
) -> None:
    """Take in what somebody says; nobody is waited for, since it may be a stranger, or a port scan."""
    connection = key.fileobj
    assert isinstance(connection, socket.socket)
    try:
        data = connection.recv(4096)
    except OSError:
        data = b""
    if isinstance(key.data, int):  # a guest, who has nothing more to say
        if not data:
            raise PeerLostError(f"rank 0: rank {key.data} ended before all ranks had come")
        return
    line, newline, _ = (key.data + data).partition(b"\n")
    rank = _welcome(line, connection, environment, guests) if newline else None
    if rank is not None:
        ears.modify(connection, selectors.EVENT_READ, rank)
    elif data and not newline and len(line) < _LONGEST_MESSAGE:
        ears.modify(connection, selectors.EVENT_READ, line)
    else:
        ears.unregister(connection)
        connection.close()


def _welcome(
    hello: bytes, connection: socket.socket, environment: LaunchEnvironment, guests: dict[int, socket.socket]
) -> int | None:
    """Greet a rank and return its number, if it is one."""
    message = _parse(hello)
    rank, size = (message.get("rank"), message.get("size")) if isinstance(message, dict) else (None, None)
    if type(rank) is not int or type(size) is not int:
        return None
    _say(connection, welcome=size)
    if size != environment.size or not 0 < rank < size or rank in guests:
        _dismiss(
            [*guests.values(), connection],
            f"a process says it is rank {rank} of {size}, but rank 0 waits for {environment.size} ranks, each once; "
            f"check {environment.source[0]} and {environment.source[1]}",
        )
    guests[rank] = connection
    return rank


def _dismiss(guests: Iterable[socket.socket], reason: str) -> None:
    for connection in guests:
        _say(connection, error=reason)
    raise LaunchError(f"rank 0: {reason}")


@contextmanager
def _connect(environment: LaunchEnvironment, place: str, deadline: float) -> Iterator[socket.socket]:
    pause = 0.05
    while True:
        try:
            connection = socket.create_connection((environment.address, environment.port), timeout=_WELCOME_WITHIN)
            break
        except OSError as error:  # not listening yet, or its name not known yet
            if time.monotonic() + pause > deadline:
                raise LaunchError(
                    f"rank {environment.rank} can't reach rank 0 at {place}: {error.strerror or error}; "
                    "is rank 0 running, and is MASTER_ADDR its host?"
                ) from None
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    with connection:
        yield connection


def _say(connection: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # it has gone; who waits for it will find out
        connection.sendall(json.dumps(message).encode() + b"\n")


def _lines(connection: socket.socket) -> Iterator[Any]:
    """The messages that come; ends when the connection does, or when something else than a message comes."""
    received = b""
    while True:
        line, newline, rest = received.partition(b"\n")
        if newline:
            received = rest
            yield _parse(line)
            continue
        try:
            data = connection.recv(4096)
        except OSError:
            return
        if not data or len(received) > _LONGEST_MESSAGE:
            return
        received += data


def _parse(line: bytes) -> Any:
    """The message in a line; None if there is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _missing(environment: LaunchEnvironment, guests: Container[int]) -> str:
    ranks = [rank for rank in range(1, environment.size) if rank not in guests]
    shown = ", ".join(map(str, ranks[:10])) + (", ..." if len(ranks) > 10 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def inherited_listener() -> socket.socket | None:
    """The socket a launcher on this host opened for rank 0, so that no other process can take its port."""
    descriptor = os.environ.pop(LISTENER_VARIABLE, None)
    if descriptor is None:
        return None
    listener = socket.socket(fileno=int(descriptor))
    listener.listen()
    return listener
