"""What a run leaves behind: who took part, with what settings, and what each rank measured."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path
from typing import IO, Any

import torch

import renkei
from renkei.communicators.communicator import Communicator
from renkei.strict_json import dumps
from renkei.training.run_dir import create


class RunRecord:
    """A run's folder: ``run.json`` from rank 0, and ``rank-R.jsonl``, one JSON object a line, from each rank.

    ``run.json`` is there from the start, with the host and process id of each rank, and gets the result at the end.
    Creation is a collective operation.
    """

    def __init__(self, run_dir: Path, comm: Communicator, settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self._is_writer = comm.rank == 0
        who = {"rank": comm.rank, "host": socket.gethostname(), "pid": os.getpid(), "device": str(comm.device)}
        self._run: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "settings": settings,
            "world_size": comm.size,
            "communicator": f"{comm.name}/{comm.options.backend}",
            "threads": torch.get_num_threads(),
            "versions": {"renkei": renkei.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "ranks": comm.all_gather_object(who),
        }
        create(run_dir)
        self._write_run()
        self._lines: IO[str] = (run_dir / f"rank-{comm.rank}.jsonl").open("a", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line to this rank's file; it is there even if the process is killed right after."""
        self._lines.write(dumps({"kind": kind, "time": time.time(), **values}) + "\n")

    def finish(self, result: dict[str, Any]) -> None:
        """Add the result to ``run.json`` and close the files."""
        self._run["result"] = result
        self._write_run()
        self._lines.close()

    def _write_run(self) -> None:
        if self._is_writer:
            partial = self.run_dir / ".run.json"
            partial.write_text(dumps(self._run, indent=2) + "\n")
            partial.rename(self.run_dir / "run.json")
