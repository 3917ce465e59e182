"""A small convolutional network with batch normalization, for images of 8 x 8 to 32 x 32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class ConvNet(nn.Module):
    """3 x 3 convolutions, each with batch normalization and ReLU, then the mean over space and a linear layer.

    Args:
        channels: of the images.
        widths: channels after each convolution.
        strides: of each convolution.
        num_classes: length of the output.
        dropout: before the linear layer.
    """

    def __init__(
        self, channels: int, widths: Sequence[int], strides: Sequence[int], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, stride in zip(widths, strides, strict=True):
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores, n x `num_classes`."""
        return self.classifier(self.dropout(self.features(images).mean(dim=(2, 3))))


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them; takes images as well as vectors."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
