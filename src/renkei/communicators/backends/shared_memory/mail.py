"""Messages from one rank of a host to another, over a stream of bytes for each pair."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from renkei.communicators.backends.shared_memory.mesh import Mesh
from renkei.communicators.work_queue import Operation, Transfer, WorkQueue
from renkei.errors import DeadlineError, MismatchError, PeerLostError, RenkeiError, afresh

_HEAD = struct.Struct("<qq")  # tag, number of bytes


@dataclass(eq=False)
class _Expected:
    """A message somebody waits for."""

    data: Tensor
    source: int | None
    tag: int
    operation: Operation
    came_from: int = -1


@dataclass(eq=False)
class _Kept:
    """A message nobody has asked for yet."""

    data: Tensor
    source: int
    tag: int


class Mail:
    """Sends in order, to each rank on its own; keeps what comes until somebody asks for it by its tag."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.rank
        self._streams: dict[int, socket.socket] = {}
        for other in mesh.peers:
            if other > mesh.rank:
                own, its = socket.socketpair()
                with its:
                    mesh.send(other, b"mail", [its.fileno()])
            else:
                _, (descriptor,) = mesh.recv(other, 1)
                own = socket.socket(fileno=descriptor)
            own.settimeout(None)
            self._streams[other] = own
        self._outgoing = {other: WorkQueue(f"mail to rank {other}") for other in self._streams}
        self._guard = threading.Lock()
        self._expected: deque[_Expected] = deque()
        self._kept: deque[_Kept] = deque()
        self._ended: dict[int, str] = {}
        self._readers: list[threading.Thread] = []

    def send(self, data: Tensor, dest: int, tag: int) -> Transfer:
        """Begin to send bytes."""
        line = self._outgoing[dest]
        return line.transfer(lambda: self._send(data, dest, tag))

    def recv(self, data: Tensor, source: int | None, tag: int) -> Transfer:
        """Begin to receive bytes."""
        operation = Operation(lambda: None)
        expected = _Expected(data, source, tag, operation)
        with self._guard:
            self._start_readers()
            kept = next((each for each in self._kept if _fits(expected, each.source, each.tag)), None)
            if kept is not None:
                self._kept.remove(kept)
            elif lost := self._lost(source):
                operation.fail(lost)
            else:
                self._expected.append(expected)
        if kept is not None:
            self._deliver(expected, kept.source, kept.data)
        who = "any rank" if source is None else f"rank {source}"

        def wait(seconds: float) -> None:
            if not operation.await_end(seconds):
                raise DeadlineError(f"rank {self._rank} waited {seconds:g} s for a message from {who}")
            if operation.error is not None:
                raise afresh(operation.error)

        return Transfer(operation, wait, source=lambda: expected.came_from)

    def interrupt(self) -> None:
        """End all streams: other ranks see it at once, and so do threads of this rank that wait."""
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all streams."""
        for line in self._outgoing.values():
            line.close()
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join()
        for stream in self._streams.values():
            stream.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def _send(self, data: Tensor, dest: int, tag: int) -> None:
        try:
            self._streams[dest].sendall(_HEAD.pack(tag, data.numel()))
            self._streams[dest].sendall(data.numpy().data)
        except OSError as error:
            raise PeerLostError(
                f"rank {self._rank} lost rank {dest} in send: {error}; it failed or left: see its log"
            ) from None

    # -- receiving ------------------------------------------------------------------------------------------------

    def _start_readers(self) -> None:
        """From now on, whatever comes is read, so that nobody's message stands in another's way."""
        if self._readers:
            return
        for source in self._streams:
            reader = threading.Thread(target=self._read, args=(source,), name=f"renkei mail from {source}", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, source: int) -> None:
        stream = self._streams[source]
        expected: _Expected | None = None
        try:
            while True:
                expected = None
                tag, num_bytes = _HEAD.unpack(
                    _read_exactly(stream, torch.empty(_HEAD.size, dtype=torch.uint8, device="cpu"))
                )
                with self._guard:
                    expected = next((each for each in self._expected if _fits(each, source, tag)), None)
                    if expected is not None:
                        self._expected.remove(expected)
                if expected is not None and expected.data.numel() == num_bytes:
                    _read_exactly(stream, expected.data)
                    expected.came_from = source
                    expected.operation.perform()
                    continue
                data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                _read_exactly(stream, data)
                if expected is not None:
                    self._deliver(expected, source, data)
                else:
                    self._keep(source, tag, data)
        except Exception as error:  # the stream has ended, or there is no memory for what comes
            self._end(source, str(error) or type(error).__name__, expected)

    def _keep(self, source: int, tag: int, data: Tensor) -> None:
        """Keep a message nobody waited for when it began to come, unless somebody does by now."""
        with self._guard:
            expected = next((each for each in self._expected if _fits(each, source, tag)), None)
            if expected is None:
                self._kept.append(_Kept(data, source, tag))
                return
            self._expected.remove(expected)
        self._deliver(expected, source, data)

    def _deliver(self, expected: _Expected, source: int, data: Tensor) -> None:
        if expected.data.numel() != data.numel():
            expected.operation.fail(
                MismatchError(
                    f"rank {self._rank} expects {expected.data.numel()} bytes from rank {source}, which sent "
                    f"{data.numel()}"
                )
            )
            return
        expected.data.copy_(data)
        expected.came_from = source
        expected.operation.perform()

    def _end(self, source: int, reason: str, begun: _Expected | None) -> None:
        """Nothing comes from a rank any more: whoever waits for it is told, and whoever had got the beginning."""
        with self._guard:
            self._ended[source] = reason
            hopeless = {each: self._lost(each.source) for each in self._expected}
            self._expected = deque(each for each, lost in hopeless.items() if lost is None)
        for each, lost in hopeless.items():
            if lost is not None:
                each.operation.fail(lost)
        if begun is not None and not begun.operation.is_done:
            begun.operation.fail(self._lost_error(source))

    def _lost(self, source: int | None) -> RenkeiError | None:
        """The error of waiting for a rank that has ended, or for any when all have."""
        others = self._streams if source is None else [source]
        return self._lost_error(source) if all(other in self._ended for other in others) else None

    def _lost_error(self, source: int | None) -> RenkeiError:
        who = "all other ranks" if source is None else f"rank {source}"
        why = "connections ended" if source is None else self._ended[source]
        return PeerLostError(f"rank {self._rank} lost {who} in recv: {why}; it failed or left: see its log")


def _fits(expected: _Expected, source: int, tag: int) -> bool:
    return expected.source in (None, source) and expected.tag == tag


def _read_exactly(stream: socket.socket, data: Tensor) -> memoryview:
    """Fill `data` from a stream; raises `ConnectionError` if it ends before."""
    view = data.numpy().data
    filled = 0
    while filled < len(view):
        count = stream.recv_into(view[filled:])
        if not count:
            raise ConnectionError("connection ended")
        filled += count
    return view
