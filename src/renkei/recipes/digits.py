"""1,797 scanned digits of 8 x 8 pixels, a fifth of them held out: trains in seconds on a laptop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from renkei.recipes.recipe import Recipe, Settings

if TYPE_CHECKING:
    from torch import nn

    from renkei.data.datasets import ImageDataset

HELD_OUT = 359  # 20 %


def digits() -> Recipe:
    """A small convolutional network on the digits that come with scikit-learn."""
    settings = Settings(epochs=12, global_batch_size=64, learning_rate=0.05, warmup_epochs=1, weight_decay=5e-4)
    return Recipe("digits", "handwritten digits, 8 x 8, on a small convolutional network", settings, _load, _build)


def _load(settings: Settings) -> tuple[ImageDataset, ImageDataset]:
    from renkei.data.datasets import digits as load_digits
    from renkei.data.datasets import split

    return split(load_digits(), HELD_OUT)


def _build(settings: Settings) -> nn.Module:
    from renkei.models.convnet import ConvNet

    return ConvNet(1, widths=(32, 64, 64), strides=(1, 2, 1), num_classes=10, dropout=settings.dropout)
