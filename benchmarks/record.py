"""A record: a folder of `records/` with what was claimed, on what machine, by what command, and every raw run."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Record:
    """Collects runs and writes ``records/<date>_<name>/``: README.md and, from the start, runs.jsonl."""

    def __init__(self, name: str) -> None:
        self._folder = ROOT / "records" / f"{time.strftime('%Y-%m-%d')}_{name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._runs = self._folder / "runs.jsonl"
        self._runs.write_text("")

    def add(self, **run: Any) -> None:
        """Note one raw run, and show it."""
        line = json.dumps(run)
        print(line, flush=True)
        with self._runs.open("a") as file:
            file.write(line + "\n")

    def write(self, title: str, text: str, *, launcher: str = "") -> Path:
        """Write the README; `text` says what was found, `launcher` what started the script, if not Python alone."""
        command = (launcher or "python ") + " ".join(
            [Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]]
        )
        parts = [f"# {title}", text, f"Command: `{command}`; raw runs in `runs.jsonl`.", describe_machine()]
        (self._folder / "README.md").write_text("\n\n".join(parts) + "\n")
        return self._folder


def describe_machine() -> str:
    """Processor, cores, memory and versions, in a paragraph."""
    import torch

    import renkei

    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"Machine: {_processor()}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}. "
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, Renkei {renkei.__version__}."
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
