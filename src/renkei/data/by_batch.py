"""A dataset indexed by many samples at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import Dataset, default_collate

from renkei.data.sharding import Indices
from renkei.nested import map_tensors

Collate = Callable[[list[Any]], Any]


class ByBatch(Dataset[Any]):
    """Gives the batch of the samples at the indices it is asked for, which may be none.

    Args:
        dataset: if it can make a batch by itself, quicker than sample by sample, it has a method ``batch(indices)``.
        collate: makes a batch of a list of samples; torch's own way if None, where the dataset has no method.
        example: a sample that can be read here. An empty batch is what is made of this one, with tensors of length 0;
            what isn't a tensor, or has no dimensions, stays.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, *, example: int = 0) -> None:
        self._dataset, self._collate, self._example = dataset, collate, example

    def __getitem__(self, indices: Indices) -> Any:
        if not len(indices):
            batch_of_one = self[np.array([self._example])]
            return map_tensors(lambda tensor: tensor[:0] if tensor.ndim else tensor, batch_of_one)
        if self._collate is None and hasattr(self._dataset, "batch"):
            return self._dataset.batch(indices)
        return (self._collate or default_collate)([self._dataset[int(at)] for at in indices])
