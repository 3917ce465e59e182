"""Datasets to begin with: handwritten digits, Fashion-MNIST, MNIST, and images made up of noise."""

from __future__ import annotations

import gzip
import importlib.util
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from renkei.data.sharding import Indices, permutation
from renkei.errors import UsageError

FASHION_MNIST_FOLDERS = ("/usr/share/datasets/fashion-mnist",)  # where Debian's dataset-fashion-mnist puts it
NUM_CLASSES = 10
_IDX_UNSIGNED_BYTES = 0x08


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Labelled images that fit in memory.

    Args:
        images: n x channels x height x width, floating.
        labels: n class numbers.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if len(images) != len(labels):
            raise UsageError(f"there are {len(images)} images but {len(labels)} labels")
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self.images[at], self.labels[at]

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """The images and labels at `indices`."""
        at = torch.from_numpy(indices)
        return self.images[at], self.labels[at]

    def select(self, indices: Indices) -> ImageDataset:
        """A dataset of some of the images."""
        return ImageDataset(*self.batch(indices))


def split(dataset: ImageDataset, held_out: int, seed: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Two datasets: all but `held_out` images, and those; which ones is decided by `seed`."""
    order = permutation(len(dataset), seed=seed, epoch=0)
    return dataset.select(order[held_out:]), dataset.select(order[:held_out])


def digits() -> ImageDataset:
    """1,797 scanned digits of 1 x 8 x 8, from 0 to 1 (UCI ML repository, as scikit-learn carries them)."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UsageError("the digits come with scikit-learn; pip install scikit-learn")
    # Not by its load_digits, for which each rank would import for seconds what it needs of it for a table.
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    try:
        table = torch.from_numpy(np.loadtxt(path, dtype=np.uint8, delimiter=","))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}; install scikit-learn again") from None
    return ImageDataset(table[:, :-1].reshape(-1, 1, 8, 8).float().div(16), table[:, -1].long())


def mnist_like(folders: Sequence[str | Path]) -> tuple[ImageDataset, ImageDataset]:
    """The training and test set in the first of `folders` that exists, in MNIST's format; gzipped or not.

    Images are 1 x 28 x 28, normalized by the mean and standard deviation of the training set's pixels.

    Raises:
        UsageError: no folder is there, or files are missing or damaged.
    """
    folder = next((Path(each) for each in folders if Path(each).is_dir()), None)
    if folder is None:
        raise UsageError(
            f"no data at {' or '.join(map(str, folders))}; give a folder with train-images-idx3-ubyte(.gz) and so on: "
            "Debian's package dataset-fashion-mnist has Fashion-MNIST"
        )
    (images, labels), (test_images, test_labels) = _read_pair(folder, "train"), _read_pair(folder, "t10k")
    mean, deviation = images.mean() / 255, images.std() / 255

    def dataset(pixels: NDArray[np.uint8], classes: NDArray[np.uint8]) -> ImageDataset:
        scaled = torch.from_numpy(pixels).float().div_(255).sub_(float(mean)).div_(float(deviation))
        return ImageDataset(scaled.unsqueeze(1), torch.from_numpy(classes).long())

    return dataset(images, labels), dataset(test_images, test_labels)


def _read_pair(folder: Path, which: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images and labels that fit together."""
    images, labels = read_idx(folder, f"{which}-images-idx3-ubyte"), read_idx(folder, f"{which}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.shape != images.shape[:1] or not images.size:
        raise UsageError(
            f"{folder / which}-*: images of shape {list(images.shape)} and labels of shape {list(labels.shape)}, where "
            "[n, height, width] and [n] were expected; download the files again"
        )
    if labels.max() >= NUM_CLASSES:
        raise UsageError(f"{folder / which}-labels-*: there is a class {labels.max()}, but they go from 0 to 9")
    return images, labels


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """An array of bytes in the IDX format: 2 zero bytes, type, number of dimensions, sizes, values."""
    zipped = folder / f"{name}.gz"
    path = zipped if zipped.exists() else folder / name
    try:
        data = gzip.decompress(path.read_bytes()) if path == zipped else path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} is missing, and so is {zipped.name}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} can't be read: {error}; download it again") from None
    if len(data) < 4 or data[:3] != bytes([0, 0, _IDX_UNSIGNED_BYTES]):
        raise UsageError(f"{path} is no IDX file of bytes")
    ndim = data[3]
    shape = np.frombuffer(data, ">u4", count=ndim, offset=4) if len(data) >= 4 + 4 * ndim else np.zeros(0)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape))
    if len(shape) != ndim or values.size != math.prod(shape.tolist()):
        raise UsageError(
            f"{path} is cut short or damaged: it has {values.size} values where its header says {shape.tolist()}"
        )
    return values.reshape(shape.astype(int)).copy()


def synthetic(num_examples: int, shape: tuple[int, int, int], num_classes: int, seed: int = 0) -> ImageDataset:
    """Noise of any size, with a faint pattern for each class, to measure with where there is no data."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (num_examples,), generator=generator)
    patterns = torch.randn(num_classes, *shape, generator=generator)
    noise = torch.randn(num_examples, *shape, generator=generator)
    return ImageDataset(noise + patterns[labels] / 2, labels)
