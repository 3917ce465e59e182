"""The host that is measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Processor and number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor()}, {cores} core{'s' * (cores > 1)}"


def _processor() -> str:
    for line in _lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def available_memory() -> int:
    """Bytes that new processes can use without others' being moved out; where that isn't known, all there are."""
    for line in _lines_of("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []
