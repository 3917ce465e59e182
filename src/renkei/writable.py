"""Whether a file that was asked for can be written: told before the work it is for."""

from __future__ import annotations

import os
from pathlib import Path

from renkei.errors import UsageError


def check_writable(kind: str, path: Path) -> None:
    """Raise `UsageError` unless this file, a `kind` of file for messages, can be written."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{kind} {path} can't be written; give a file in a folder that exists and can be written to")
