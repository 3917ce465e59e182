"""Rank 0 leaves last: it waits for those who work, not for those who are dead."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from renkei.launch import farewell

Pairs = dict[int, tuple[socket.socket, socket.socket]]  # by rank, rank 0's end and its own


@pytest.fixture(autouse=True)
def _unfailed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "FAILED", threading.Event())


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = {rank: socket.socketpair() for rank in (1, 2, 3)}
    yield made
    for pair in made.values():
        for end in pair:
            end.close()


def leave_last(pairs: Pairs, pid: int | None = None) -> float:
    """How long rank 0 waits, in seconds."""
    begin = time.monotonic()
    farewell.leave_last({rank: ends[0] for rank, ends in pairs.items()}, os.getpid() if pid is None else pid)
    return time.monotonic() - begin


def check_rank_0_leaves_last(pairs: Pairs) -> None:
    left = []

    def work_on() -> None:
        time.sleep(0.3)
        left.append(3)
        farewell.leave(pairs[3][1], os.getpid())

    farewell.leave(pairs[1][1], os.getpid())
    pairs[2][1].close()  # what is left of a process that was killed
    worker = threading.Thread(target=work_on)
    worker.start()
    waited = leave_last(pairs)
    try:
        assert left == [3]
    finally:
        worker.join()
    assert waited < 5


def test_rank_0_leaves_last(pairs: Pairs) -> None:
    check_rank_0_leaves_last(pairs)


def test_red_twin_rank_0_does_not_wait(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "_has_left", lambda connection: True)
    for _, own in pairs.values():
        own.sendall(b"anything")
    with pytest.raises(AssertionError):
        check_rank_0_leaves_last(pairs)


def test_a_rank_that_failed_waits_for_nobody(pairs: Pairs) -> None:
    farewell.FAILED.set()
    assert leave_last(pairs) < 0.3


def test_who_is_waited_for_is_said_and_at_last_given_up(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(farewell, "_REPORT_AFTER", 0.1)
    monkeypatch.setattr(farewell, "_PATIENCE", 0.5)
    farewell.leave(pairs[2][1], os.getpid())
    assert 0.4 < leave_last(pairs) < 5
    waiting, leaving = capsys.readouterr().err.splitlines()
    assert waiting == "renkei: rank 0 has done its part and waits for ranks 1, 3 to end"
    assert "though ranks 1, 3 may still need it" in leaving


def test_nothing_is_said_where_all_leave_soon(pairs: Pairs, capsys: pytest.CaptureFixture[str]) -> None:
    for _, own in pairs.values():
        farewell.leave(own, os.getpid())
    leave_last(pairs)
    assert capsys.readouterr().err == ""


def test_a_forked_process_takes_no_leave_for_its_parent(pairs: Pairs) -> None:
    another = os.getpid() + 1
    for _, own in pairs.values():
        farewell.leave(own, another)
    assert leave_last(pairs, another) < 0.3
    for ends in pairs.values():
        ends[1].sendall(b"still there")
        assert ends[0].recv(100) == b"still there"


def test_who_leaves_has_left_though_a_forked_process_has_the_connection_too(pairs: Pairs) -> None:
    with pairs[1][1].dup():
        farewell.leave(pairs[1][1], os.getpid())
        assert leave_last({1: pairs[1]}) < 5


def test_leaving_a_rank_0_that_has_gone_is_no_error(pairs: Pairs) -> None:
    pairs[1][0].close()
    farewell.leave(pairs[1][1], os.getpid())
