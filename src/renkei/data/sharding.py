"""Which rank gets which sample: arithmetic on indices, the same on every rank, and no messages.

Batch k of an epoch is a slice of the epoch's permutation and each rank takes a slice of the batch, so what is
trained on does not depend on how many ranks there are, and the position in the data is one integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """How a global batch is cut.

    Attributes:
        sizes: samples by rank.
        always_equal: whether in no batch of the epoch ranks get different numbers of samples.
    """

    sizes: tuple[int, ...]
    always_equal: bool


def shard_range(num_examples: int, *, rank: int, size: int, equal: bool = False) -> range:
    """The range of `num_examples` that `rank` owns.

    By default no index is owned twice and sizes differ by at most one, the first ranks having more. With `equal`, each
    rank gets ceil(n / size) and neighbours share some: what ChainerMN's ``force_equal_length`` did.
    """
    if equal:
        length = -(-num_examples // size)
        begin = num_examples * rank // size
        return range(begin, begin + length)
    length, longer = divmod(num_examples, size)
    begin = rank * length + min(rank, longer)
    return range(begin, begin + length + (rank < longer))


def permutation(num_examples: int, *, seed: int, epoch: int) -> Indices:
    """The order of an epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_examples)
