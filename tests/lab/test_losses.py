"""Cables of the lab lose the share of packets that they are told to."""

from __future__ import annotations

import sys

import pytest

from lab.hosts import Hosts

PACKETS = 4000
RECEIVE = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
    own.bind(("", 9999)); own.settimeout(2.0)
    print("ready", flush=True)
    count = 0
    try:
        while True:
            own.recv(64); count += 1
    except TimeoutError:
        print(count, flush=True)
"""
SEND = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
    for number in range(int(sys.argv[2])):
        own.sendto(b"x", (sys.argv[1], 9999))
        if number % 20 == 0: time.sleep(0.001)
"""


def share_lost(share: float | None) -> float:
    with Hosts(2) as hosts:
        if share is not None:
            hosts.lose(1, share)
        receiver = hosts.start(1, sys.executable, "-c", RECEIVE)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = hosts.start(0, sys.executable, "-c", SEND, hosts.address(1), str(PACKETS))
        assert sender.wait(20) == 0
        assert hosts.bytes_sent(0) > PACKETS * 42  # headers of Ethernet, IP and UDP, and a byte
        return 1 - int(receiver.communicate(timeout=20)[0]) / PACKETS


def test_a_cable_loses_its_share() -> None:
    assert share_lost(0.05) == pytest.approx(0.05, abs=0.02)


def test_red_twin_a_cable_that_loses_nothing() -> None:
    assert share_lost(None) < 0.005
