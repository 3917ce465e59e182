"""Options that are lists of names."""

from __future__ import annotations

from collections.abc import Sequence

from renkei.names import check_known


def split(listing: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in listing.split(",") if name.strip()))


def split_known(kind: str, listing: str, known: Sequence[str]) -> list[str]:
    """The names of a comma-separated list, each once.

    Raises:
        UsageError: one isn't known.
    """
    names = split(listing)
    for name in names:
        check_known(kind, name, known)
    return names
