"""Sizes are read as people write them, and shown exactly."""

from __future__ import annotations

import pytest

from renkei.bench import sizes
from renkei.bench.sizes import parse_size, show_size
from renkei.errors import UsageError

SIZES = {
    "1": 1,
    "4096": 4096,
    "17B": 17,
    "16KiB": 16 * 1024,
    " 16 kib ": 16 * 1024,
    "10kB": 10_000,
    "1MiB": 2**20,
    "10MB": 10_000_000,
    "3GiB": 3 * 2**30,
    "2gb": 2 * 10**9,
}


@pytest.mark.parametrize("text", SIZES)
def test_a_size_is_read(text: str) -> None:
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1.5MiB", "1e6", "16 Ki", "1TiB", "one", "0x10", "1 MiB MiB", "²", "٣", "9" * 5000]
)
def test_what_is_no_size_is_told_with_what_is(text: str) -> None:
    with pytest.raises(UsageError, match="can't be read; write it as 16KiB, 1MiB or 10MB, or as a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0MiB", "000"])
def test_nothing_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=f"size '{text}' is nothing to add"):
        parse_size(text)


def check_shown() -> None:
    shown = {1: "1 B", 4097: "4,097 B", 16 * 1024: "16 KiB", 10**7: "10 MB", 2**20: "1 MiB", 2**21 + 2**10: "2,049 KiB"}
    for number, text in shown.items():
        assert show_size(number) == text
        assert parse_size(text.replace(",", "")) == number


def test_a_size_is_shown_exactly() -> None:
    check_shown()


def test_red_twin_a_size_that_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_SHOWN", ((2**20, "MiB"), (2**10, "KiB"), (10**3, "kB"), (10, "B")))
    with pytest.raises(AssertionError):
        check_shown()
