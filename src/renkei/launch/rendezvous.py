"""Bringing the processes of a job together at rank 0's address, without waiting for a stranger or for ever.

Rank 0 listens at the address everyone knows; each other rank says who it is, is welcomed at once, and learns where
the job's store is once all have come. A rank that meets somebody else there, or nobody in time, says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from renkei.errors import LaunchError, PeerLostError
from renkei.launch.environments import LaunchEnvironment

_WELCOME_WITHIN = 5.0  # seconds in which rank 0 answers, once it listens
_LONGEST_MESSAGE = 65536  # bytes
_REPORT_EVERY = 10.0  # seconds after which rank 0 says for whom it waits
_REASONS = {"error": LaunchError, "lost": PeerLostError}  # by the word with which rank 0 tells why the job can't begin
_SILENCE = object()  # instead of a message
LISTENER_VARIABLE = "RENKEI_LISTEN_FD"


def open_listener(address: str, port: int) -> socket.socket:
    """A listening socket: on the loopback interface if that is where the job is, else on all interfaces.

    Whether `address` is this host's isn't checked: it may be a name or an address that only others know.

    Args:
        port: 0 for one that is free.

    Raises:
        LaunchError: the port is in use or reserved, or this host gives no socket.
    """
    host = "127.0.0.1" if is_loopback(address) else ""
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server((host, port))
    except OSError as error:
        is_about_port = port != 0 and error.errno in (errno.EADDRINUSE, errno.EACCES)
        fix = "choose another MASTER_PORT" if is_about_port else "rank 0 must be able to open a TCP socket on its host"
        where = f"port {port}" if port else "a free port"
        raise LaunchError(
            f"rank 0 can't listen on {where} of {host or 'its host'}: {os.strerror(error.errno or 0)}; {fix}"
        ) from None


def is_loopback(address: str) -> bool:
    """Whether an address is only reachable on its own host."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


def host(
    environment: LaunchEnvironment, listener: socket.socket, store_port: int, timeout: float
) -> dict[int, socket.socket]:
    """Rank 0's part: welcome the other ranks and, when all have come, tell them the store's port.

    Returns the connection to each other rank, which ends when that rank's process does.

    Raises:
        LaunchError: some have not come in `timeout` seconds, or two say they are the same rank; told to all who came.
        PeerLostError: one that had come has ended; told to all others who came.
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
        stack.pop_all()  # the guests' connections stay
        for key in ears.get_map().values():
            if isinstance(key.data, bytes) and isinstance(key.fileobj, socket.socket):  # a stranger
                key.fileobj.close()
    return guests


def join(environment: LaunchEnvironment, timeout: float) -> tuple[int, socket.socket]:
    """The part of every other rank: returns the port of the job's store on rank 0's host, and the connection to rank 0.

    Rank 0 may come as late as `timeout` seconds after this rank, and then waits for the others as long again.

    Raises:
        LaunchError: nobody, or somebody else, is there, or rank 0 falls silent; or it says that the job can't begin.
        PeerLostError: rank 0, or a rank that had come to it, ended before all had come.
    """
    assert environment.address is not None
    assert environment.port is not None
    place = f"{environment.address}:{environment.port}"
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        connection = stack.enter_context(_connect(environment, place, deadline))
        _say(connection, rank=environment.rank, size=environment.size)
        answers = _lines(connection)
        if _next(answers, connection, _WELCOME_WITHIN) != {"welcome": environment.size}:
            raise LaunchError(
                f"rank {environment.rank}: what listens at {place} is not rank 0 of this job; "
                "choose another MASTER_PORT"
            )
        # Rank 0's own deadline is earlier, so only a network or a process that stands still is met by this one.
        patience = timeout + _WELCOME_WITHIN
        answer = _next(answers, connection, patience)
        if answer is _SILENCE:
            raise LaunchError(
                f"rank {environment.rank}: rank 0 at {place} has not said for {patience:g} s whether all ranks have "
                "come; is its host still reachable, and does it wait no longer than this rank?"
            )
        if answer is None:
            raise PeerLostError(f"rank {environment.rank}: rank 0 ended before all ranks had come")
        for word, kind in _REASONS.items():
            if word in answer:
                raise kind(f"rank {environment.rank}: {answer[word]}")
        stack.pop_all()
    return int(answer["port"]), connection


def _open_door(listener: socket.socket, ears: selectors.BaseSelector, stack: ExitStack) -> None:
    with contextlib.suppress(OSError):  # who knocked has gone again
        connection = stack.enter_context(listener.accept()[0])
        connection.settimeout(_WELCOME_WITHIN)
        _keep_alive(connection)
        ears.register(connection, selectors.EVENT_READ, b"")


def _keep_alive(connection: socket.socket) -> None:
    """Notice when the other host is gone, and let no router forget a connection on which nothing is said."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)  # seconds; by itself it would be hours


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
            others = [guest for rank, guest in guests.items() if rank != key.data]
            _dismiss(others, f"rank {key.data} ended before all ranks had come", word="lost")
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


def _dismiss(guests: Iterable[socket.socket], reason: str, word: str = "error") -> NoReturn:
    for connection in guests:
        _say(connection, **{word: reason})
    raise _REASONS[word](f"rank 0: {reason}")


def _connect(environment: LaunchEnvironment, place: str, deadline: float) -> socket.socket:
    pause = 0.05
    while True:
        try:
            connection = socket.create_connection((environment.address, environment.port), timeout=_WELCOME_WITHIN)
            if connection.getsockname() != connection.getpeername():
                return connection
            # Nobody listens, and the kernel gave this end the very port it was to reach: TCP connects it to itself.
            connection.close()
            problem = os.strerror(errno.ECONNREFUSED)
        except OSError as error:  # not listening yet, or its name not known yet
            problem = error.strerror or str(error)
        left = deadline - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"rank {environment.rank} can't reach rank 0 at {place}: {problem}; "
                "is rank 0 running, and is MASTER_ADDR its host?"
            )
        time.sleep(min(pause, left))
        pause = min(1.0, 1.5 * pause)


def _say(connection: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # it has gone; who waits for it will find out
        connection.sendall(json.dumps(message).encode() + b"\n")


def _next(messages: Iterator[Any], connection: socket.socket, timeout: float) -> Any:
    """The message that comes next; None if the connection ends, `_SILENCE` if nothing comes in time."""
    connection.settimeout(timeout)
    return next(messages, None)


def _lines(connection: socket.socket) -> Iterator[Any]:
    """The messages that come, and `_SILENCE` when none does in time; ends with the connection, or with no message."""
    received = b""
    while True:
        line, newline, rest = received.partition(b"\n")
        if newline:
            received = rest
            yield _parse(line)
            continue
        try:
            data = connection.recv(4096)
        except TimeoutError:
            yield _SILENCE
            continue
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


def _missing(environment: LaunchEnvironment, guests: dict[int, socket.socket]) -> str:
    return list_ranks([rank for rank in range(1, environment.size) if rank not in guests])


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words; of many, the first ten."""
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
