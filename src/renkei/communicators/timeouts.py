"""Spans of time as torch takes them, and how it says that one is over."""

from __future__ import annotations

from datetime import timedelta


def milliseconds(seconds: float) -> timedelta:
    """A span of time as torch takes it; never zero, which would mean for ever."""
    return timedelta(milliseconds=max(1, round(seconds * 1000)))


def is_timeout(text: str) -> bool:
    """Whether what an error of torch's says is that a wait lasted too long; its kind doesn't tell."""
    return "imed out" in text or "imeout" in text
