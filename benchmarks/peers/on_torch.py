"""What the contestants on PyTorch have in common: the perceptron, Adam, and a step of plain training."""

from __future__ import annotations

import os
from collections.abc import Callable

import task
import torch
import turns
from torch import Tensor, nn

RANK = int(os.environ["RANK"])


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The perceptron and its optimizer; Adam's fused kernel is the quickest of torch's."""
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    arrays = [torch.from_numpy(array) for array in task.weights()]
    for weight, bias in zip(arrays[::2], arrays[1::2], strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
        layers += [layer, nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    fused = os.environ.get("PEERS_ADAM", "fused") == "fused"
    return net, torch.optim.Adam(net.parameters(), lr=task.LEARNING_RATE, fused=fused)


def backward(loss: Tensor) -> None:
    """As a script does it that is not told otherwise."""
    loss.backward()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], None] = backward) -> None:
    """Take turns with a net and an optimizer as a peer has wrapped them."""
    inputs, target = (torch.from_numpy(array) for array in task.samples(RANK))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), target)
        backward(loss)
        optimizer.step()
        return loss

    turns.take_turns(
        RANK,
        step,
        loss=lambda loss: float(loss),
        parameters=lambda: [each.detach().numpy() for each in net.parameters()],
    )
