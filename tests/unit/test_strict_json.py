"""What is printed as JSON is JSON for every reader, not for Python's alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renkei.strict_json import dumps

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def strictly(text: str) -> Any:
    """Read JSON as a reader does that has no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@settings(deadline=None, max_examples=50)
@given(VALUES)
def test_every_value_can_be_read_by_a_strict_reader(value: Any) -> None:
    strictly(dumps(value))


def test_numbers_that_are_not_finite_become_null() -> None:
    assert strictly(dumps({"loss": math.nan, "more": [math.inf, (-math.inf, 1.5)]})) == {
        "loss": None,
        "more": [None, [None, 1.5]],
    }


@settings(deadline=None, max_examples=50)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_numbers_keep_every_bit(value: float) -> None:
    assert strictly(dumps([value])) == [value]


def test_without_indent_it_is_one_line() -> None:
    assert "\n" not in dumps({"text": "two\nlines", "list": [1, 2]})
    assert dumps({"a": 1}, indent=2) == '{\n  "a": 1\n}'


def test_red_twin_pythons_own_writer() -> None:
    with pytest.raises(AssertionError):
        strictly(json.dumps({"loss": math.nan}))
