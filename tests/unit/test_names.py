"""An unknown name is an error of one line that says what was meant, or what there is."""

from __future__ import annotations

import pytest

from renkei.errors import UsageError
from renkei.names import check_known

KNOWN = {"digits": 1, "fashion-mnist": 2}


def refusal(name: str) -> str:
    with pytest.raises(UsageError) as caught:
        check_known("recipe", name, KNOWN)
    return str(caught.value)


def test_a_known_name_is_no_error() -> None:
    check_known("recipe", "digits", KNOWN)


@pytest.mark.parametrize(
    ("name", "near"), [("digit", "digits"), ("fashion_mnist", "fashion-mnist"), ("Digits", "digits")]
)
def test_the_nearest_name_is_proposed(name: str, near: str) -> None:
    assert refusal(name) == f"recipe {name!r} is unknown; did you mean {near!r}?"


@pytest.mark.parametrize("name", ["imagenet", "", "x"])
def test_where_none_is_near_all_are_listed(name: str) -> None:
    assert refusal(name) == f"recipe {name!r} is unknown; known are digits, fashion-mnist"


def test_a_name_of_several_lines_is_told_in_one() -> None:
    assert "\n" not in refusal("dig\nits")
