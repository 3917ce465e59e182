"""Ranks that outlive a test: results by rank, the first failure, and an end in time, whatever a rank does."""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import Popen
from typing import IO

import pytest
import torch

import leaks
from contract import served_ranks
from contract.served_ranks import Launcher, ServedRanks, ServedRanksError, mpiexec, renkei_launch
from needs import linux, mpich
from processes import plain_environment
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError

pytestmark = [linux, pytest.mark.timeout(120)]
SPEC = "flat/gloo"
PATIENCE = 2.5  # seconds; enough for ranks that don't hang, also where cores are busy
SOON = 15.0  # seconds; far below the time that ranks may take to answer
HELD: list[mmap.mmap] = []


class UnportableError(Exception):
    """Can't be unpickled: that would call it with one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def _warn() -> None:
    warnings.warn("of a rank's own", stacklevel=1)


def _misuse() -> None:
    raise UsageError("this can't be")


def _raise_unportable() -> None:
    raise UnportableError("not ", "portable")


def _fail() -> None:
    pytest.fail("in a test's own words")


def _wait_for_ever() -> None:
    threading.Event().wait()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_shared_memory(name: Path) -> mmap.mmap:
    """A name in /dev/shm that stays when its process ends."""
    with name.open("a+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


@pytest.fixture(scope="module", params=[renkei_launch, pytest.param(mpiexec, marks=mpich)])
def three(request: pytest.FixtureRequest) -> Iterator[ServedRanks]:
    with ServedRanks(3, request.param) as ranks:
        yield ranks


class TestThreeRanks:
    """Started anew whenever a test has ended them."""

    @pytest.fixture
    def ranks(self, three: ServedRanks) -> ServedRanks:
        three.await_all()
        return three

    @pytest.fixture(autouse=True)
    def _nothing_is_left_behind(self, ranks: ServedRanks, _nothing_is_left_behind: None) -> None:
        """What is there is noted when the ranks are."""

    @pytest.fixture
    def pids(self, ranks: ServedRanks) -> list[int]:
        return ranks.run(lambda comm: os.getpid(), spec=SPEC)

    def test_results_come_by_rank_from_processes_that_stay(self, ranks: ServedRanks, pids: list[int]) -> None:
        assert len({*pids, os.getpid()}) == 4
        assert ranks.run(lambda comm, factor: factor * comm.rank, 7, spec=SPEC) == [0, 7, 14]
        assert ranks.run(lambda comm: os.getpid(), spec=SPEC) == pids

    def test_each_request_has_a_communicator_of_its_own(self, ranks: ServedRanks) -> None:
        def look(comm: Communicator) -> tuple[str, str, float, int]:
            return comm.name, comm.options.backend, comm.options.timeout, comm.inter_rank

        seen = ranks.run(look, spec="naive/gloo", nodes=["a", "b", "a"], timeout=3.5)
        assert seen == [("naive", "gloo", 3.5, 0), ("naive", "gloo", 3.5, 1), ("naive", "gloo", 3.5, 0)]
        assert ranks.run(look, spec=SPEC) == [("flat", "gloo", 5.0, 0)] * 3

    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.parametrize(
        ("fail", "kind", "text"),
        [
            (_warn, UserWarning, "of a rank's own"),
            (_misuse, UsageError, "this can't be"),
            (_raise_unportable, RuntimeError, "UnportableError: not portable"),
            (_fail, RuntimeError, "Failed: in a test's own words"),
        ],
    )
    def test_red_twin_a_check_that_fails_on_one_rank(
        self, ranks: ServedRanks, pids: list[int], fail: Callable[[], None], kind: type, text: str, rank: int
    ) -> None:
        def check(comm: Communicator) -> None:
            if comm.rank == rank:
                fail()
            comm.all_reduce(torch.zeros(3))

        begin = time.monotonic()
        with pytest.raises(kind, match=text) as caught:
            ranks.run(check, spec=SPEC, timeout=2 * SOON)
        assert time.monotonic() - begin < SOON
        assert f"on rank {rank} of 3" in caught.value.__notes__[0]
        assert ranks.run(lambda comm: os.getpid(), spec=SPEC) == pids  # they go on

    def test_red_twin_a_result_that_can_not_be_sent(self, ranks: ServedRanks) -> None:
        with pytest.raises(TypeError, match="pickle"):
            ranks.run(lambda comm: threading.Lock(), spec=SPEC)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_red_twin_a_rank_that_ends(self, ranks: ServedRanks, pids: list[int], rank: int) -> None:
        """All are ended, soon, and what they said is told."""

        def check(comm: Communicator) -> None:
            comm.barrier()
            if comm.rank == rank:
                print("last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            _wait_for_ever()

        begin = time.monotonic()
        with pytest.raises(ServedRanksError, match=r"(?s)ended: rank \d of 3\n.*last words"):
            ranks.run(check, spec=SPEC)
        assert time.monotonic() - begin < SOON
        assert not any(map(leaks.is_running, pids))

    @pytest.mark.parametrize(("hang", "said"), [(_wait_for_ever, "in _wait_for_ever"), (_stop, "")])
    def test_red_twin_a_rank_that_hangs(
        self, ranks: ServedRanks, pids: list[int], hang: Callable[[], None], said: str
    ) -> None:
        """All are ended when the time is up, and where the rank was is told if it can be."""
        begin = time.monotonic()
        with pytest.raises(ServedRanksError, match=rf"(?s)no answer in time: rank 1 of 3\n.*{said}"):
            ranks.run(lambda comm: hang() if comm.rank == 1 else None, spec=SPEC, patience=PATIENCE)
        assert PATIENCE <= time.monotonic() - begin < SOON
        assert not any(map(leaks.is_running, pids))


def test_what_ended_ranks_have_in_shared_memory_is_removed() -> None:
    name = Path("/dev/shm", f"served-ranks-{os.getpid()}")

    def check(comm: Communicator) -> None:
        shared = hold_shared_memory(name)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while shared:
            time.sleep(1)

    with ServedRanks(2, renkei_launch) as ranks, pytest.raises(ServedRanksError, match="ended: rank 1 of 2"):
        ranks.run(check, spec=SPEC)
    assert not name.exists()


def start_program(program: str) -> Launcher:
    """Starts one process, of another program than should be."""

    def launcher(size: int, variables: Mapping[str, str], output: IO[str]) -> list[Popen[str]]:
        return [Popen([sys.executable, "-c", program], env=plain_environment(**variables), stdout=output, text=True)]

    return launcher


@pytest.mark.parametrize(("program", "said"), [("print('no luck')", "no luck"), ("import time; time.sleep(100)", "")])
def test_red_twin_ranks_that_do_not_come(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_ranks, "_STARTING", 1.0)
    with (
        ServedRanks(2, start_program(program)) as ranks,
        pytest.raises(ServedRanksError, match=rf"of 2 ranks only \[\] came\n{said}"),
    ):
        ranks.await_all()


def _leave_with_code_3(comm: Communicator) -> None:
    atexit.register(os._exit, 3)


def _leave_late(comm: Communicator) -> None:
    atexit.register(time.sleep, 100)


def _leave_memory_behind(comm: Communicator) -> None:
    HELD.append(hold_shared_memory(Path("/dev/shm", f"served-ranks-{os.getpid()}")))


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (_leave_with_code_3, r"left with exit codes \[1\].*\n.*exited with code 3"),
        (_leave_late, "not left in time"),
        (_leave_memory_behind, r"behind them \['/dev/shm/served-ranks-"),
    ],
)
def test_red_twin_ranks_that_leave_in_disorder(
    check: Callable[[Communicator], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_ranks, "_ENDING", 5.0)
    with pytest.raises(ServedRanksError, match=text), ServedRanks(1, renkei_launch) as ranks:
        ranks.run(check, spec=SPEC)
