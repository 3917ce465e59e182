"""What every contestant trains, made by numpy so that all begin with the same weights and see the same samples."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

WIDTHS = (784, 1000, 1000, 10)
BATCH = 100  # of each rank
LEARNING_RATE = 1e-3  # of Adam, whose other settings are the usual ones: 0.9, 0.999, 1e-8


def weights() -> list[NDArray[np.float32]]:
    """A weight, out x in, and a bias for each layer of the perceptron; the same on all ranks."""
    random = np.random.RandomState(0)
    arrays = []
    for fan_in, fan_out in itertools.pairwise(WIDTHS):
        weight = random.standard_normal((fan_out, fan_in)) / np.sqrt(fan_in)
        arrays += [weight.astype(np.float32), np.zeros(fan_out, np.float32)]
    return arrays


def samples(rank: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A rank's own batch: BATCH x 784 between 0 and 1, and a class of ten for each."""
    random = np.random.RandomState(1 + rank)
    return random.rand(BATCH, WIDTHS[0]).astype(np.float32), random.randint(WIDTHS[-1], size=BATCH)
