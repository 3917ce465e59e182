"""60,000 pictures of clothes of 28 x 28 pixels, ten classes, and 10,000 to test on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from renkei.recipes.recipe import Recipe, Settings

if TYPE_CHECKING:
    from torch import nn

    from renkei.data.datasets import ImageDataset


def fashion_mnist() -> Recipe:
    """A small convolutional network on Fashion-MNIST; ``data`` is its folder, or MNIST's, where it isn't installed."""
    settings = Settings(epochs=6, global_batch_size=128, learning_rate=0.2, warmup_epochs=0.5, weight_decay=5e-4)
    return Recipe("fashion-mnist", "clothes, 28 x 28, on a small convolutional network", settings, _load, _build)


def _load(settings: Settings) -> tuple[ImageDataset, ImageDataset]:
    from renkei.data.datasets import FASHION_MNIST_FOLDERS, mnist_like

    return mnist_like(FASHION_MNIST_FOLDERS if settings.data is None else (settings.data,))


def _build(settings: Settings) -> nn.Module:
    from renkei.models.convnet import ConvNet

    return ConvNet(1, widths=(16, 32, 64, 128), strides=(1, 2, 2, 2), num_classes=10, dropout=settings.dropout)
