"""Spans of time as torch takes them."""

from __future__ import annotations

from datetime import timedelta


def milliseconds(seconds: float) -> timedelta:
    """A span of time as torch takes it; never zero, which would mean for ever."""
    return timedelta(milliseconds=max(1, round(seconds * 1000)))
