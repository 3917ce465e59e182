"""Random numbers by name: one stream that all ranks share, one for each rank,
and one for each batch that a data worker makes.

Where ranks must do alike (initial weights, the order of samples) they draw from the shared stream; where they must
not (dropout, augmentation) from their own. A batch has its own stream, so that it is the same however many workers
there are and wherever training began. Seeds are hashes of what names the stream, so streams don't overlap as
seed + rank would with the next seed's.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def shared_seed(seed: int, *where: int) -> int:
    """The seed, of 63 bits, of the stream all ranks share; `where` may be an epoch or the like."""
    return _hash("shared", seed, *where)


def rank_seed(seed: int, *, rank: int) -> int:
    """The seed, of 63 bits, of one rank's own stream."""
    return _hash("rank", seed, rank)


def batch_seed(seed: int, *, rank: int, epoch: int, batch: int) -> int:
    """The seed, of 63 bits, of the stream with which a data worker makes one rank's part of a batch."""
    return _hash("batch", seed, rank, epoch, batch)


def seed_default_generators(seed: int) -> None:
    """Seed the generators that Python, NumPy and torch use when none is given."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _hash(kind: str, *numbers: int) -> int:
    name = (kind, *map(int, numbers))  # int: NumPy's integers are written in another way
    return int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "little") >> 1
