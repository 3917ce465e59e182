"""What a cable carries, measured."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.hosts import Hosts

_TRANSFER = Path(__file__).with_name("transfer.py")
_PORT = "24680"
_LONGEST = 45.0  # seconds


def measure_rate(hosts: Hosts, source: int, destination: int, num_bytes: int, patience: float = 20.0) -> float:
    """Bits per second that a plain TCP connection carries from one host to another.

    Raises:
        ConnectionError: nothing passes for `patience` seconds.
    """
    transfer = (sys.executable, "-S", str(_TRANSFER), str(patience))
    receiver = hosts.start(destination, *transfer, "receive", _PORT)
    sender = hosts.start(source, *transfer, "send", hosts.address(destination), _PORT, str(num_bytes))
    for process in (sender, receiver):
        output, problems = process.communicate(timeout=_LONGEST)
        if process.returncode != 0:
            receiver.kill()
            raise ConnectionError(f"hosts {source} and {destination}: {problems}")
    received, seconds = output.split()
    assert int(received) == num_bytes
    return 8 * num_bytes / float(seconds)
