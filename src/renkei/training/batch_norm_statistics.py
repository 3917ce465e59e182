"""Running statistics of batch normalization, which each rank estimates from its own samples, made one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from renkei.communicators.communicator import Communicator


@torch.no_grad()
def pool_batch_norm(model: nn.Module, comm: Communicator, num_samples: int) -> None:
    """Let each layer's running mean and variance be those of all ranks' samples together.

    To be called before evaluation and before a model is saved; in between, ranks' estimates differ. One message.

    Args:
        num_samples: how many samples this rank has trained on since the last call; what it counts for.
    """
    layers = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]
    if not layers:
        return
    means, variances = _flat(each.running_mean for each in layers), _flat(each.running_var for each in layers)
    count = means.new_tensor([num_samples])
    total = comm.all_reduce(torch.cat([count, num_samples * means, num_samples * (variances + means**2)]))
    if total[0] == 0:
        return
    pooled_means, second_moments = (total[1:] / total[0]).chunk(2)
    pooled_variances = (second_moments - pooled_means**2).clamp(min=0)  # rounding may go below where means are large
    sizes = [layer.num_features for layer in layers]
    for layer, mean, variance in zip(layers, pooled_means.split(sizes), pooled_variances.split(sizes), strict=True):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([each.detach().double().flatten() for each in tensors if each is not None])
