"""Where a run's records go."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from renkei.errors import UsageError


def new_run_dir(name: str) -> Path:
    """A folder under ``runs`` that no other run has."""
    return Path("runs") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{name}_{secrets.token_hex(2)}"


def create(folder: Path) -> None:
    """Make a folder that a user has named, if it isn't there.

    Raises:
        UsageError: it can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {folder} can't be made: {error.strerror}; choose another") from None
