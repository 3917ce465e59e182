"""Leaving a job: rank 0, which holds the job's store, leaves last, so that no other rank finds the store gone.

Each other rank keeps the connection over which it came to rank 0. However its process ends, that ends too, so nobody
waits for the dead, and nobody need say goodbye.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping

from renkei.failures.first_cause import FAILED
from renkei.launch.rendezvous import list_ranks

_PATIENCE = 300.0  # seconds rank 0 stays for the others
_REPORT_AFTER = 10.0  # seconds after which it says for whom


def leave(connection: socket.socket, pid: int) -> None:
    """Every other rank's part; does nothing in a process that was forked from the one that joined, `pid`."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):  # rank 0 has gone
        connection.shutdown(socket.SHUT_RDWR)  # closing isn't enough where a forked process has the connection too
    connection.close()


def leave_last(guests: Mapping[int, socket.socket], pid: int) -> None:
    """Rank 0's part: return when the other ranks have left, at once if this process has failed, and after 300 s anyway.

    Does nothing in a process that was forked from the one that holds the store, `pid`.
    """
    if os.getpid() != pid:
        return
    with selectors.DefaultSelector() as ears:
        for rank, connection in guests.items():
            ears.register(connection, selectors.EVENT_READ, rank)
        _await_silence(ears)
    for connection in guests.values():
        connection.close()


def _await_silence(ears: selectors.BaseSelector) -> None:
    begin, is_reported = time.monotonic(), False
    while ears.get_map() and not FAILED.is_set():
        waited = time.monotonic() - begin
        if waited > _PATIENCE:
            _say(f"rank 0 ends, and the job's store with it, though {_remaining(ears)} may still need it")
            return
        if waited > _REPORT_AFTER and not is_reported:
            is_reported = True
            _say(f"rank 0 has done its part and waits for {_remaining(ears)} to end")
        for key, _ in ears.select(0.1):
            assert isinstance(key.fileobj, socket.socket)
            if _has_left(key.fileobj):
                ears.unregister(key.fileobj)


def _has_left(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except OSError:
        return True


def _remaining(ears: selectors.BaseSelector) -> str:
    return list_ranks(sorted(key.data for key in ears.get_map().values()))


def _say(text: str) -> None:
    print(f"renkei: {text}", file=sys.stderr, flush=True)
