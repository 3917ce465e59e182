"""Nests of tensors are mapped tensor by tensor, and keep their types."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from renkei.nested import map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])
NESTS = {
    "a tensor": (ONE, TWO),
    "a list": ([ONE, ONE], [TWO, TWO]),
    "a tuple": ((ONE, [ONE]), (TWO, [TWO])),
    "a named tuple": (Pair(ONE, Pair(1, ONE)), Pair(TWO, Pair(1, TWO))),
    "a dict": ({"a": ONE, 7: {"b": ONE}}, {"a": TWO, 7: {"b": TWO}}),
    "an ordered dict": (OrderedDict(b=ONE, a=ONE), OrderedDict(b=TWO, a=TWO)),
    "a dict of the user's": (UserDict(a=ONE), UserDict(a=TWO)),
    "a default dict": (defaultdict(list, a=[ONE]), defaultdict(list, a=[TWO])),
    "what is no tensor": (("text", 1, None, b"bytes", {1}), ("text", 1, None, b"bytes", {1})),
    "nothing": (((), [], {}), ((), [], {})),
}


@pytest.mark.parametrize("kind", NESTS)
def test_a_nest_keeps_its_structure(kind: str) -> None:
    nest, expected = NESTS[kind]
    mapped = map_tensors(double, nest)
    assert type(mapped) is type(expected)
    assert mapped == expected


def test_the_nest_itself_is_not_changed() -> None:
    nest = {"a": [ONE], "b": (ONE,)}
    mapped = map_tensors(double, nest)
    assert nest["a"][0] is ONE
    assert mapped["a"] is not nest["a"]


def test_a_default_dict_keeps_its_factory() -> None:
    mapped = map_tensors(double, defaultdict(list, a=[ONE]))
    assert mapped["missing"] == []


def test_the_order_of_a_dict_is_kept() -> None:
    assert list(map_tensors(double, {"b": ONE, "a": ONE})) == ["b", "a"]
