"""What only some platforms have."""

from __future__ import annotations

import os
import sys

from renkei.errors import UsageError


def has_shared_memory() -> bool:
    """Whether this platform has what the backend of that name is made of; Linux has."""
    return hasattr(os, "memfd_create") and hasattr(os, "eventfd")


def check_shared_memory() -> None:
    """Raise `UsageError` if it has not."""
    if not has_shared_memory():
        raise UsageError(f"backend 'shared_memory' needs Linux, but this is {sys.platform}; use backend='gloo'")
