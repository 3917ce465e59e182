"""Random numbers by name: one stream that all ranks share, one for each rank and worker.

Where ranks must do alike (initial weights, the order of samples) they draw from the shared stream; where they must
not (dropout, augmentation) from their own. Seeds are hashes of what names the stream, so streams don't overlap as
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


def rank_seed(seed: int, *, rank: int, worker: int = 0, epoch: int = 0) -> int:
    """The seed, of 63 bits, of one rank's (and one of its data workers') stream in an epoch."""
    return _hash("rank", seed, rank, worker, epoch)


def seed_default_generators(seed: int) -> None:
    """Seed the generators that Python, NumPy and torch use when none is given."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _hash(kind: str, *numbers: int) -> int:
    name = (kind, *map(int, numbers))  # int: NumPy's integers are written in another way
    return int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "little") >> 1
