"""One end of a plain TCP connection, with nothing but the standard library: what any library could reach.

python transfer.py PATIENCE receive PORT       prints how many bytes came, and the seconds from the first to the last
python transfer.py PATIENCE send ADDRESS PORT BYTES

PATIENCE is how many seconds may pass without a byte.
"""

from __future__ import annotations

import socket
import sys
import time

_BLOCK = 2**16


def receive(patience: float, port: int) -> None:
    with socket.create_server(("", port)) as listener:
        listener.settimeout(patience)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(patience)
        total = len(connection.recv(_BLOCK))
        begin = time.perf_counter()
        while received := len(connection.recv(_BLOCK)):
            total += received
        print(total, time.perf_counter() - begin)


def send(patience: float, address: str, port: int, num_bytes: int) -> None:
    with connect(patience, address, port) as connection:
        connection.settimeout(patience)
        block = bytes(_BLOCK)
        for _ in range(num_bytes // _BLOCK):
            connection.sendall(block)
        connection.sendall(block[: num_bytes % _BLOCK])


def connect(patience: float, address: str, port: int) -> socket.socket:
    """A connection, once the other end is there and listens."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((address, port), max(0.1, deadline - time.monotonic()))
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def main() -> None:
    patience, what, *arguments = sys.argv[1:]
    if what == "receive":
        receive(float(patience), int(arguments[0]))
    else:
        send(float(patience), arguments[0], int(arguments[1]), int(arguments[2]))


if __name__ == "__main__":
    main()
