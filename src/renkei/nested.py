"""Batches and states are nests of tuples, lists and dicts with tensors in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(fn: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """A copy of the nest with ``fn(tensor)`` in the place of each tensor; what isn't a nest or a tensor stays."""
    if isinstance(nest, Tensor):
        return fn(nest)
    if isinstance(nest, MutableMapping):
        mapped = copy.copy(nest)  # so that a defaultdict keeps its factory
        mapped.update({key: map_tensors(fn, value) for key, value in nest.items()})
        return mapped
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):  # a named tuple takes its fields one by one
        return type(nest)(*(map_tensors(fn, value) for value in nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(map_tensors(fn, value) for value in nest)
    return nest
