"""Meeting at rank 0's address, with threads for ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from renkei.errors import RenkeiError
from renkei.launch import rendezvous
from renkei.launch.environments import LaunchEnvironment

STORE_PORT = 4321
HANG = 15.0


def environment(rank: int, size: int, port: int) -> LaunchEnvironment:
    source = ("RANK", "WORLD_SIZE")
    return LaunchEnvironment("variables", rank, size, None, None, "127.0.0.1", port, source)


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


def join(place: LaunchEnvironment, timeout: float = HANG) -> int:
    """The port of the store; the connection is closed."""
    port, connection = rendezvous.join(place, timeout)
    connection.close()
    return port


def host(place: LaunchEnvironment, listener: socket.socket, timeout: float = HANG) -> list[int]:
    """The ranks that have come; their connections are closed."""
    guests = rendezvous.host(place, listener, STORE_PORT, timeout)
    for connection in guests.values():
        connection.close()
    return sorted(guests)


def assemble(size: int, guests: list[tuple[int, int]], timeout: float = HANG) -> list[Any]:
    """The outcomes of rank 0 of `size` and of guests that say they are a rank of a size."""
    with rendezvous.open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        def begin() -> list[int]:
            with listener:
                return host(environment(0, size, port), listener, timeout)

        def come(rank: int, its_size: int) -> int:
            return join(environment(rank, its_size, port), timeout)

        return together(begin, *(lambda guest=guest: come(*guest) for guest in guests))
