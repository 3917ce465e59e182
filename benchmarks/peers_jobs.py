"""Jobs of two processes that train when they are told to: what `peers.py` starts, in environments it makes once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
RANKS = 2
SHORT = 0.5  # seconds; of a shorter wait, beginning and ending it is much
STARTING, TURN, ENDING = 120.0, 120.0, 20.0  # seconds after which something is wrong


@dataclass(frozen=True)
class Contestant:
    """What is started: a file of `benchmarks/peers/`, its arguments, and the environment, by default this one.

    `adam` is torch's implementation: "fused", or "default" for what torch chooses when it isn't asked.
    """

    file: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    by_mpi: bool = False
    adam: str = "fused"


@dataclass
class Job:
    """A contestant's processes, and a connection to each of its ranks."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    log: Path
    streams: dict[int, Any] = field(default_factory=dict)
    _waiting_since: float = 0.0

    def train(self, steps: int) -> list[dict[str, Any]]:
        """Let all ranks take so many steps; what each of them tells, in their order.

        `idle_share` is added: what part of a core the rank used since its last turn.
        """
        waited = time.perf_counter() - self._waiting_since
        for stream in self.streams.values():
            stream.write(json.dumps({"steps": steps}) + "\n")
            stream.flush()
        replies = [self._reply(rank) for rank in range(RANKS)]
        self._waiting_since = time.perf_counter()
        waited = max(waited, SHORT)
        return [{**reply, "idle_share": reply["while_waiting"] / waited} for reply in replies]

    def _reply(self, rank: int) -> dict[str, Any]:
        line = self.streams[rank].readline()
        if not line:
            raise RuntimeError(f"rank {rank} of {self.name!r} ended; its job said:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        """Close the connections, by which the ranks end; those that don't are killed."""
        for stream in self.streams.values():
            stream.close()
        deadline = time.monotonic() + ENDING
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def start(contestants: Mapping[str, Contestant]) -> Iterator[dict[str, Job]]:
    """All jobs, once all their ranks wait for their turn; they have ended when the context is left."""
    pythons = {name: python(contestant.environment) for name, contestant in contestants.items()}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=RANKS * len(contestants)))
        address = "{}:{}".format(*listener.getsockname())
        jobs: dict[str, Job] = {}
        for number, (name, contestant) in enumerate(contestants.items()):
            log = logs / f"{number}.txt"
            environ = {"PEERS_ADDRESS": address, "PEERS_NAME": name, "PEERS_ADAM": contestant.adam}
            jobs[name] = Job(name, _spawn(contestant, pythons[name], environ, log), log)
            stack.callback(jobs[name].end)
            _welcome(listener, jobs[name])
        yield jobs


def _spawn(contestant: Contestant, python: Path, environ: dict[str, str], log: Path) -> list[subprocess.Popen[bytes]]:
    """Start the ranks, each with one thread for its arithmetic; by mpiexec, or by the variables torchrun sets."""
    command = [str(python), str(PEERS / contestant.file), *contestant.arguments]
    environ = {**os.environ, **environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    if contestant.by_mpi:
        per_rank = [environ]
        command = [str(python.parent / "mpiexec"), "-n", str(RANKS), *command]
    else:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "peers"}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(RANKS))
        per_rank = [
            {**environ, **job, **sizes, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))} for rank in range(RANKS)
        ]
    with log.open("wb") as file:
        return [
            subprocess.Popen(command, env=each, stdin=subprocess.DEVNULL, stdout=file, stderr=file) for each in per_rank
        ]


def _welcome(listener: socket.socket, job: Job) -> None:
    """Accept the connection of each rank."""
    listener.settimeout(STARTING)
    try:
        while len(job.streams) < RANKS:
            connection, _ = listener.accept()
            connection.settimeout(TURN)
            with connection:  # which ends with its stream
                stream = connection.makefile("rw")
            hello = json.loads(stream.readline())
            if hello["name"] != job.name:
                raise RuntimeError(f"{hello['name']!r} connected while {job.name!r} was expected to")
            job.streams[hello["rank"]] = stream
    except TimeoutError as error:
        found = f"only ranks {sorted(job.streams)} of {job.name!r} connected within {STARTING:.0f} s; its job said:"
        raise RuntimeError(f"{found}\n{job.log.read_text()[-3000:]}") from error
    job._waiting_since = time.perf_counter()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def python(environment: str | None) -> Path:
    """The interpreter of an environment, which is made if what it requires isn't what was installed there last."""
    if environment is None:
        return Path(sys.executable)
    requirements, folder = PEERS / f"{environment}.txt", PEERS / ".venvs" / environment
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        print(f"making the environment of {environment}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        installed.write_text(requirements.read_text())
    return folder / "bin" / "python"
