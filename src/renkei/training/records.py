"""What a run leaves behind: who took part, with what settings, and what each rank measured."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

import renkei
from renkei.communicators.communicator import Communicator
from renkei.errors import UsageError
from renkei.strict_json import dumps
from renkei.training.run_dir import RUN_FILE, check_unused, create, take_back, used


class RunRecord:
    """A run's folder: ``run.json`` from rank 0, and ``rank-R.jsonl``, one JSON object a line, from each rank.

    ``run.json`` is there from the start, with the host and process id of each rank, and gets the result at the end.
    Creation is a collective operation.

    Raises:
        UsageError: the folder is another run's, or a rank can't write there; on every rank.
    """

    def __init__(self, run_dir: Path, comm: Communicator, settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self._is_writer = comm.rank == 0
        who = {"rank": comm.rank, "host": socket.gethostname(), "pid": os.getpid(), "device": str(comm.device)}
        self._run: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "settings": settings,
            "world_size": comm.size,
            "communicator": f"{comm.name}/{comm.options.backends}",
            "threads": torch.get_num_threads(),
            "versions": {"renkei": renkei.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "ranks": comm.all_gather_object(who),
        }
        self._lines = _open_lines(run_dir, comm)
        self._write_run()

    def write(self, kind: str, **values: Any) -> None:
        """Add a line to this rank's file; it is there even if the process is killed right after."""
        self._lines.write(dumps({"kind": kind, "time": time.time(), **values}) + "\n")

    def add(self, **values: Any) -> None:
        """Add to ``run.json`` what the run has found out about itself, if it is new."""
        if not values.items() <= self._run.items():
            self._run |= values
            self._write_run()

    def finish(self, result: dict[str, Any]) -> None:
        """Add the result to ``run.json`` and close the files."""
        self._run["result"] = result
        self._write_run()
        self._lines.close()

    def _write_run(self) -> None:
        if self._is_writer:
            partial = self.run_dir / f".{RUN_FILE}.{os.getpid()}"
            partial.write_text(dumps(self._run, indent=2) + "\n")
            partial.rename(self.run_dir / RUN_FILE)


def _open_lines(run_dir: Path, comm: Communicator) -> IO[str]:
    """This rank's file, once all ranks have theirs; if one can't, none is left and all raise the same error.

    Rank 0's is made first, and by its name claims the folder: of two runs that want it, one gets it. (``run.json``
    itself can't be the claim, for whoever sees it is to find all of it there.)
    """
    with ExitStack() as undo:
        lines: IO[str] | None = None
        for is_turn in (comm.rank == 0, comm.rank != 0):
            problem = None
            if is_turn:
                try:
                    lines = _open_own(run_dir, comm.rank, undo)
                except UsageError as error:
                    problem = str(error)
            _raise_first(comm.all_gather_object(problem))
        undo.pop_all()
    assert lines is not None
    return lines


def _open_own(run_dir: Path, rank: int, undo: ExitStack) -> IO[str]:
    check_unused(run_dir)
    undo.callback(take_back, create(run_dir))
    path = run_dir / f"rank-{rank}.jsonl"
    try:
        lines = path.open("x", buffering=1)
    except FileExistsError:
        raise used(run_dir) from None
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}; choose another --run-dir") from None
    undo.callback(path.unlink, missing_ok=True)
    undo.callback(lines.close)
    return lines


def _raise_first(problems: Sequence[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise UsageError(f"rank {rank}: {problem}" if len(problems) > 1 else problem)
