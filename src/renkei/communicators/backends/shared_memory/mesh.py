"""Connections among the ranks of one host: a socket for each pair, by which a rank's end is seen at once.

Over them travel descriptors of memory and of other sockets, so nothing here has a name that could be left behind: the
addresses at which ranks meet are in Linux's abstract namespace and gone with their sockets.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time

import torch.distributed as dist

from renkei.communicators.timeouts import milliseconds
from renkei.errors import DeadlineError, LaunchError, PeerLostError

_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # process, user and group number
_MOST_BYTES = 2**12  # of a note
_PROBLEM = "mesh/problem"
_GLANCE = 0.2  # seconds between looks whether another rank has given up


class Mesh:
    """One connection to each other rank."""

    def __init__(self, store: dist.Store, *, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self.peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
            address = f"\0renkei-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(size)
            store.set(f"mesh/{rank}", address[1:])
            for lower in range(rank):
                self.peers[lower] = self._connect(store, lower, deadline)
            for _ in range(size - rank - 1):
                self._accept(store, listener, deadline)

    def _connect(self, store: dist.Store, other: int, deadline: float) -> socket.socket:
        key = f"mesh/{other}"
        store.wait([key], milliseconds(max(0.0, deadline - time.monotonic())))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(self._timeout)
        try:
            connection.connect(f"\0{store.get(key).decode()}")
        except OSError as error:
            connection.close()
            problem = (
                f"rank {self.rank} can't reach rank {other} inside this host ({error}); ranks in different containers "
                "or network namespaces share no memory: use backend='gloo'"
            )
            store.set(_PROBLEM, problem)
            raise LaunchError(problem) from None
        connection.send(_HELLO.pack(self.rank))
        return connection

    def _accept(self, store: dist.Store, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(_GLANCE)
        while True:
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                if store.check([_PROBLEM]):
                    raise LaunchError(store.get(_PROBLEM).decode()) from None
                if time.monotonic() > deadline:
                    missing = [other for other in range(self.rank + 1, self.size) if other not in self.peers]
                    raise DeadlineError(
                        f"rank {self.rank}: ranks {missing} did not come for shared memory within {self._timeout:g} s"
                    ) from None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            connection.close()
            raise LaunchError(f"rank {self.rank}: a process of another user ({user}) came for its shared memory")
        connection.settimeout(self._timeout)
        (other,) = _HELLO.unpack(connection.recv(_HELLO.size))
        self.peers[other] = connection

    def send(self, other: int, note: bytes, descriptors: list[int]) -> None:
        """Send a short note and open files to a rank."""
        try:
            socket.send_fds(self.peers[other], [note], descriptors)
        except OSError as error:
            raise PeerLostError(
                f"rank {self.rank} lost rank {other}: {error}; it failed or left: see its log"
            ) from None

    def recv(self, other: int, num_descriptors: int) -> tuple[bytes, list[int]]:
        """The next note of a rank, and the files that came with it."""
        try:
            note, descriptors, _, _ = socket.recv_fds(self.peers[other], _MOST_BYTES, num_descriptors)
        except TimeoutError:
            raise DeadlineError(f"rank {self.rank} waited {self._timeout:g} s for rank {other}'s memory") from None
        except OSError as error:
            raise PeerLostError(
                f"rank {self.rank} lost rank {other}: {error}; it failed or left: see its log"
            ) from None
        if not note:
            raise PeerLostError(f"rank {self.rank} lost rank {other}; it failed or left early: see its log")
        return note, descriptors

    def interrupt(self) -> None:
        """End all connections: the other ranks see it at once, and so does a thread of this rank that waits."""
        for connection in self.peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets; nobody may be waiting for them."""
        for connection in self.peers.values():
            connection.close()
