"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

from renkei.errors import UsageError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d{1,18}) ?([a-z]*)", re.ASCII)
_SHOWN = ((2**30, "GiB"), (10**9, "GB"), (2**20, "MiB"), (10**6, "MB"), (2**10, "KiB"), (10**3, "kB"))


def parse_size(text: str) -> int:
    """The number of bytes that "16KiB", "1MiB", "10MB" or "4096" stand for; upper and lower case are the same.

    Raises:
        UsageError: it is none of these, or no byte at all.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"size {text!r} can't be read; write it as 16KiB, 1MiB or 10MB, or as a number of bytes")
    if int(match[1]) == 0:
        raise UsageError(f"size {text!r} is nothing to add; it must be at least one element")
    return int(match[1]) * _UNITS[match[2]]


def show_size(num_bytes: int) -> str:
    """The exact size, in the largest unit of which it is a multiple: "16 KiB", "10 MB", "4,097 B"."""
    for factor, unit in _SHOWN:
        if num_bytes % factor == 0 and num_bytes >= factor:
            return f"{num_bytes // factor:,} {unit}"
    return f"{num_bytes:,} B"
