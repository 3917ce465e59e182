"""The host that is measured."""

from __future__ import annotations

import os
import platform
import sys
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
    """Bytes that are free or can be made so, in this host and in this container; where that isn't known, all there are.

    What a container holds of files it has read can be made free (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    in_host = next((line for line in _lines_of("/proc/meminfo") if line.startswith("MemAvailable:")), None)
    if in_host is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(in_host.split()[1]) * 1024, _available_in_container())


def _available_in_container(group: str = "/sys/fs/cgroup") -> int:
    try:
        (most,), (used,) = _lines_of(f"{group}/memory.max"), _lines_of(f"{group}/memory.current")
        files = dict(line.split() for line in _lines_of(f"{group}/memory.stat"))["inactive_file"]
        return int(most) - int(used) + int(files)
    except (ValueError, KeyError):  # there is no limit
        return sys.maxsize


def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []
