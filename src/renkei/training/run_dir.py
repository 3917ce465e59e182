"""Where a run's records go."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from renkei.errors import UsageError

RUN_FILE = "run.json"


def new_run_dir(name: str) -> Path:
    """A folder under ``runs`` that no other run has."""
    return Path("runs") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{name}_{secrets.token_hex(2)}"


def create(folder: Path) -> list[Path]:
    """Make a folder that a user has named, if it isn't there, and see that files can be made in it.

    Returns the folders that were made, it and those around it, the innermost first.

    Raises:
        UsageError: the folder can't be made or written to.
    """
    made: list[Path] = []
    try:
        for each in (*reversed(folder.parents), folder):
            with contextlib.suppress(FileExistsError):  # or it is a file: then what follows fails
                if not each.exists():
                    each.mkdir()
                    made.insert(0, each)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        take_back(made)
        raise UsageError(f"folder {folder} can't be written to: {error.strerror}; choose another") from None
    return made


def take_back(made: Sequence[Path]) -> None:
    """Remove what `create` made, with the logs of ranks; what others have put there stays."""
    for log in made[0].glob("rank-*.log") if made else ():
        log.unlink(missing_ok=True)
    for each in made:
        with contextlib.suppress(OSError):
            each.rmdir()


def is_used(folder: Path) -> bool:
    """Whether a run has left its records there."""
    return os.path.exists(folder / RUN_FILE)


def check_unused(folder: Path) -> None:
    """Raise `UsageError` if a run has left its records there: those of another are not to be mixed with them."""
    if is_used(folder):
        raise used(folder)


def used(folder: Path) -> UsageError:
    """The error that a folder is another run's."""
    return UsageError(f"{folder} holds another run's records; choose another --run-dir")
