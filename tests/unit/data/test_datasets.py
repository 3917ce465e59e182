"""The datasets recipes train on: their sizes, their splits, their numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from needs import needs
from renkei.data.datasets import FASHION_MNIST_FOLDERS, ImageDataset, digits, mnist_like, split, synthetic
from renkei.errors import UsageError

fashion_mnist = needs(
    any(Path(folder).is_dir() for folder in FASHION_MNIST_FOLDERS),
    f"needs Fashion-MNIST in {FASHION_MNIST_FOLDERS[0]}: apt-get install dataset-fashion-mnist",
)


def numbered(length: int) -> ImageDataset:
    return ImageDataset(torch.arange(length).float().reshape(-1, 1, 1, 1), torch.arange(length))


def test_the_digits() -> None:
    from sklearn.datasets import load_digits

    dataset, expected = digits(), load_digits()
    assert torch.equal(dataset.images, torch.from_numpy(expected.images).float().div(16).unsqueeze(1))
    assert torch.equal(dataset.labels, torch.from_numpy(expected.target))
    assert len(dataset) == 1797
    assert (dataset.images.shape, dataset.images.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (dataset.images.min(), dataset.images.max()) == (0, 1)
    assert dataset.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert dataset.labels.dtype == torch.int64


def test_a_split_puts_each_sample_on_one_side_and_is_always_the_same() -> None:
    training, held_out = split(numbered(1797), 359)
    assert (len(training), len(held_out)) == (1438, 359)
    assert sorted([*training.labels.tolist(), *held_out.labels.tolist()]) == list(range(1797))
    assert training.images.flatten().long().equal(training.labels)
    assert split(numbered(1797), 359)[1].labels.equal(held_out.labels)
    assert not split(numbered(1797), 359, seed=1)[1].labels.equal(held_out.labels)


def test_a_batch_is_the_samples_one_by_one() -> None:
    dataset = digits()
    indices = np.array([7, 0, 7, 1796])
    images, labels = dataset.batch(indices)
    assert images.equal(torch.stack([dataset[int(at)][0] for at in indices]))
    assert labels.tolist() == [int(dataset[int(at)][1]) for at in indices]


def test_as_many_labels_as_images_are_needed() -> None:
    with pytest.raises(UsageError, match="3 images but 2 labels"):
        ImageDataset(torch.zeros(3, 1, 2, 2), torch.zeros(2, dtype=torch.int64))


@fashion_mnist
def test_fashion_mnist() -> None:
    training, test = mnist_like(FASHION_MNIST_FOLDERS)
    assert training.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert training.labels.bincount().tolist() == [6_000] * 10
    assert test.labels.bincount().tolist() == [1_000] * 10
    assert training.images.double().mean() == pytest.approx(0, abs=1e-5)
    assert training.images.double().std() == pytest.approx(1, abs=1e-5)
    assert 0.0 < abs(float(test.images.mean())) < 0.01  # normalized by the training set's numbers, not by its own


def test_synthetic_images_are_the_same_each_time_and_tell_their_class() -> None:
    dataset = synthetic(200, (3, 5, 7), num_classes=4, seed=1)
    assert dataset.images.shape == (200, 3, 5, 7)
    assert set(dataset.labels.tolist()) == set(range(4))
    assert synthetic(200, (3, 5, 7), num_classes=4, seed=1).images.equal(dataset.images)
    assert not synthetic(200, (3, 5, 7), num_classes=4, seed=2).images.equal(dataset.images)
    centres = torch.stack([dataset.images[dataset.labels == label].mean(dim=0) for label in range(4)])
    nearest = torch.cdist(dataset.images.flatten(1), centres.flatten(1)).argmin(dim=1)
    assert (nearest == dataset.labels).double().mean() > 0.9
