"""A contestant's side of the benchmark: it trains when it is told to, and otherwise waits in the kernel.

Needs nothing but numpy, for it runs in every peer's environment. Each rank has a connection of its own to the
benchmark, so that none waits inside its library, which may do so by looking again and again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

LONGEST_WAIT = 900.0  # seconds for its turn, after which a contestant ends by itself


def take_turns(
    rank: int, step: Callable[[], Any], loss: Callable[[Any], float], parameters: Callable[[], Iterable[Any]]
) -> None:
    """Train whenever the benchmark says so, until it closes the connection.

    Args:
        step: one training step; returns what `loss` makes a number of, which is not timed.
        parameters: arrays, of which a digest is told.
    """
    host, port = os.environ["PEERS_ADDRESS"].split(":")
    with socket.create_connection((host, int(port)), timeout=LONGEST_WAIT) as connection:
        stream = connection.makefile("rw")
        _tell(stream, name=os.environ["PEERS_NAME"], rank=rank)
        busy = time.process_time()
        for line in stream:
            while_waiting = time.process_time() - busy
            seconds, last = [], None
            for _ in range(json.loads(line)["steps"]):
                begin = time.perf_counter()
                last = step()
                seconds.append(time.perf_counter() - begin)
            _tell(stream, seconds=seconds, loss=loss(last), digest=_digest(parameters()), while_waiting=while_waiting)
            busy = time.process_time()


def _tell(stream: Any, **message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]
