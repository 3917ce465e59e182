"""Small files in MNIST's format, whole or damaged, for tests to read."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray


def encode(values: ArrayLike) -> bytes:
    """An array of bytes in the IDX format."""
    array = np.asarray(values, np.uint8)
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def images(length: int, side: int = 28, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(256, size=(length, side, side), dtype=np.uint8)


def labels(length: int) -> NDArray[np.uint8]:
    return np.arange(length, dtype=np.uint8) % 10


def write(folder: Path, num_training: int, num_test: int, *, zipped: bool = False) -> Path:
    """The four files of a dataset, in a folder that is made."""
    folder.mkdir()
    for which, length in (("train", num_training), ("t10k", num_test)):
        for name, values in (("images-idx3", images(length)), ("labels-idx1", labels(length))):
            data = encode(values)
            path = folder / f"{which}-{name}-ubyte"
            (path.with_name(f"{path.name}.gz") if zipped else path).write_bytes(gzip.compress(data) if zipped else data)
    return folder
