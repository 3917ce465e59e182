"""The small networks: what goes in, what comes out, and how many parameters are between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from renkei.models.convnet import ConvNet, perceptron


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("side", [8, 28, 32])
@pytest.mark.parametrize("length", [1, 5])
def test_scores_for_each_class_come_out_whatever_the_size_of_images(side: int, length: int) -> None:
    model = ConvNet(3, widths=(4, 8, 8), strides=(1, 2, 1), num_classes=7).eval()
    scores = model(torch.rand(length, 3, side, side))
    assert scores.shape == (length, 7)
    assert scores.dtype == torch.float32


def test_the_number_of_parameters_is_that_of_its_layers() -> None:
    model = ConvNet(1, widths=(32, 64, 64), strides=(1, 2, 1), num_classes=10)
    convolutions = 9 * (1 * 32 + 32 * 64 + 64 * 64)
    normalizations = 2 * (32 + 64 + 64)
    assert number_of_parameters(model) == convolutions + normalizations + 64 * 10 + 10 == 56_554


def test_strides_shrink_what_is_between() -> None:
    model = ConvNet(1, widths=(2, 3, 5), strides=(2, 1, 2), num_classes=2)
    assert model.features(torch.rand(4, 1, 28, 28)).shape == (4, 5, 7, 7)


def test_each_width_needs_a_stride() -> None:
    with pytest.raises(ValueError, match="zip"):
        ConvNet(1, widths=(2, 3), strides=(2,), num_classes=2)


def test_dropout_acts_in_training_only() -> None:
    model = ConvNet(1, widths=(16,), strides=(1,), num_classes=2, dropout=0.5)
    images = torch.rand(2, 1, 8, 8)
    model.eval()
    assert model(images).equal(model(images))
    model.train()
    assert not model(images).equal(model(images))


def test_a_perceptron_takes_images_and_vectors() -> None:
    model = perceptron(64, 20, 10)
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert model(torch.rand(3, 64)).shape == (3, 10)
    assert number_of_parameters(model) == 64 * 20 + 20 + 20 * 10 + 10
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "ReLU", "Linear"]
