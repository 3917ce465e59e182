"""Where a run's records go."""

from __future__ import annotations

import secrets
import time
from pathlib import Path


def new_run_dir(name: str) -> Path:
    """A folder under ``runs`` that no other run has."""
    return Path("runs") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{name}_{secrets.token_hex(2)}"
