"""Names a user may have mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from renkei.errors import UsageError


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise `UsageError`, with the nearest known name if one is near, unless `name` is known."""
    choices = sorted(known)
    if name not in choices:
        near = difflib.get_close_matches(name, choices, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(choices)}"
        raise UsageError(f"{kind} {name!r} is unknown; {hint}")
