"""Ranks that are processes and outlive a test: importing torch takes seconds, so they are started once for many."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import cloudpickle

from contract.rank_requests import Answer, Request
from contract.rank_server import OUTPUT_VARIABLE, SOCKET_VARIABLE, TELL_WHERE
from needs import MPIEXEC
from processes import plain_environment

SERVER = ("-m", "contract.rank_server")
_STARTING = 90.0  # seconds for all ranks to be there
_ANSWERING = 45.0  # seconds for all ranks to answer; below the time that a test may take
_ENDING = 15.0  # seconds for all processes to end
_TELLING = 0.3  # seconds for a rank to write where it is

# Starts ranks that run SERVER; given how many, their variables, and where to write; returns what was started.
Launcher = Callable[[int, Mapping[str, str], IO[str]], "list[subprocess.Popen[str]]"]


class ServedRanksError(Exception):
    """Ranks ended or did not answer in time; with what they wrote."""


def renkei_launch(size: int, variables: Mapping[str, str], output: IO[str]) -> list[subprocess.Popen[str]]:
    """Ranks of this host, started by `renkei launch`."""
    return [_start([sys.executable, "-m", "renkei", "launch", "-n", str(size), *SERVER], variables, output)]


def mpiexec(size: int, variables: Mapping[str, str], output: IO[str]) -> list[subprocess.Popen[str]]:
    """Ranks of this host, started by MPICH's mpiexec."""
    return [_start([str(MPIEXEC), "-n", str(size), sys.executable, *SERVER], variables, output)]


def _start(command: Sequence[str], variables: Mapping[str, str], output: IO[str]) -> subprocess.Popen[str]:
    environment = plain_environment(**variables)
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True
    )


class _Rank(NamedTuple):
    connection: Connection
    pid: int


class ServedRanks:
    """`size` ranks, which are started when first asked for, and anew after they were ended; gone after leaving."""

    def __init__(self, size: int, launcher: Launcher) -> None:
        self._size, self._launcher = size, launcher
        self._started: list[subprocess.Popen[str]] = []
        self._listener: socket.socket | None = None
        self._ranks: dict[int, _Rank] = {}
        self._shared_memory: set[Path] = set()
        self._already_said = 0  # bytes of output that belong to earlier requests

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._output = self._folder / "output"
        self._output.touch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._ranks:
                self.hang_up()
                self._see_them_leave()
        finally:
            self._end()
            shutil.rmtree(self._folder)

    # -- requests -------------------------------------------------------------------------------------------------

    def run(
        self,
        check: Callable[..., Any],
        *args: Any,
        spec: str,
        nodes: Sequence[str] | None = None,
        patience: float = _ANSWERING,
        timeout: float = 5.0,
        **options: Any,
    ) -> list[Any]:
        """Call ``check(comm, *args)`` on all ranks, with a communicator made for it; returns results by rank.

        Raises:
            ServedRanksError: a rank ended, or some have not answered after `patience` seconds; all have been ended.
            what `check` raised first, on whichever rank.
        """
        assert nodes is None or len(nodes) == self._size
        self.await_all()
        self._already_said = self._output.stat().st_size
        request = Request(spec, check, args, nodes, {"timeout": timeout, **options})
        answers = self._ask(cloudpickle.dumps(request), time.monotonic() + patience)
        failures = [(answer.time, answer.error) for answer in answers if answer.error is not None]
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]
        return [answer.result for answer in answers]

    def _ask(self, request: bytes, deadline: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for rank in self._ranks:
            with self._lost_if_closed(rank) as connection:
                connection.send_bytes(request)
        while len(answers) < self._size:
            silent = {each.connection: rank for rank, each in self._ranks.items() if rank not in answers}
            heard = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not heard:
                raise self._give_up("no answer in time", silent.values())
            for rank in [rank for connection, rank in silent.items() if connection in heard]:
                with self._lost_if_closed(rank) as connection:
                    answers[rank] = pickle.loads(connection.recv_bytes())
        return [answers[rank] for rank in range(self._size)]

    @contextmanager
    def _lost_if_closed(self, rank: int) -> Iterator[Connection]:
        try:
            yield self._ranks[rank].connection
        except (EOFError, OSError):
            raise self._give_up("ended", [rank]) from None

    def _give_up(self, what: str, ranks: Iterable[int]) -> ServedRanksError:
        """End all ranks; returns an error that says what those have done, and what all have written."""
        self._note_shared_memory()  # before the launcher ends those that still have it
        ranks = list(ranks)
        for rank in ranks:
            _signal(self._ranks[rank].pid, TELL_WHERE)
        time.sleep(_TELLING)
        self._end()
        return self._error(f"{what}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self._size}")

    def _error(self, text: str) -> ServedRanksError:
        return ServedRanksError(f"{text}\n{self._output.read_bytes()[self._already_said :].decode(errors='replace')}")

    # -- life -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the ranks, if they aren't there, and don't wait for them."""
        if self._started:
            return
        path = self._folder / "socket"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(self._size)
        self._listener.settimeout(0.1)
        variables = {SOCKET_VARIABLE: str(path), OUTPUT_VARIABLE: str(self._output)}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # names mean there what they mean here
        with self._output.open("a") as output:
            self._started = self._launcher(self._size, variables, output)

    def await_all(self) -> None:
        """Return when all ranks are there; at once where they were already."""
        self.begin()
        deadline = time.monotonic() + _STARTING
        while self._listener is not None:
            with contextlib.suppress(TimeoutError, EOFError):
                accepted, _ = self._listener.accept()
                accepted.setblocking(True)
                connection = Connection(accepted.detach())
                rank, pid = pickle.loads(connection.recv_bytes())
                self._ranks[rank] = _Rank(connection, pid)
            if len(self._ranks) == self._size:
                self._listener.close()
                self._listener = None
                self._note_shared_memory()
            elif time.monotonic() > deadline or any(each.poll() is not None for each in self._started):
                come = sorted(self._ranks)
                self._end()
                raise self._error(f"of {self._size} ranks only {come} came")

    def hang_up(self) -> None:
        """Let the ranks leave by themselves."""
        self._note_shared_memory()
        for rank in self._ranks.values():
            rank.connection.close()

    def _see_them_leave(self) -> None:
        """Raise unless they do in time, in order, and with all that is theirs."""
        self._already_said = self._output.stat().st_size
        deadline = time.monotonic() + _ENDING
        try:
            codes = [each.wait(max(0.0, deadline - time.monotonic())) for each in self._started]
        except subprocess.TimeoutExpired:
            raise self._give_up("not left in time", self._ranks) from None
        left = sorted(str(name) for name in self._shared_memory if name.exists())
        if any(codes) or left:
            raise self._error(f"left with exit codes {codes}, and behind them {left}")

    def _end(self) -> None:
        """Nothing that was started is there afterwards, nor what ended ranks couldn't remove themselves."""
        self._note_shared_memory()
        if any(each.poll() is None for each in self._started):
            for rank in self._ranks.values():
                _signal(rank.pid, signal.SIGKILL)
        for each in self._started:
            each.terminate()
        deadline = time.monotonic() + _ENDING
        for each in self._started:
            try:
                each.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        for rank in self._ranks.values():
            rank.connection.close()
        if self._listener is not None:
            self._listener.close()
        for name in self._shared_memory:
            name.unlink(missing_ok=True)
        self._started, self._listener, self._ranks, self._shared_memory = [], None, {}, set()

    def _note_shared_memory(self) -> None:
        """Remember what of /dev/shm the ranks have: whoever is killed can't remove it."""
        for rank in self._ranks.values():
            self._shared_memory |= _shared_memory_of(rank.pid)


@contextmanager
def serve(sizes: Iterable[int], launcher: Launcher) -> Iterator[dict[int, ServedRanks]]:
    """By size, that many ranks."""
    with ExitStack() as stack:
        by_size = {size: stack.enter_context(ServedRanks(size, launcher)) for size in sizes}
        yield by_size
        for ranks in by_size.values():
            ranks.hang_up()  # all of them, before waiting for any


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _shared_memory_of(pid: int) -> set[Path]:
    names = set()
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, slash, path = line.partition("/dev/shm/")
            if slash and not path.endswith(" (deleted)"):
                names.add(Path("/dev/shm", path))
    return names
