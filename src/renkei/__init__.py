"""Renkei: distributed deep learning on PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from renkei import hooks as hooks
    from renkei.communicators.communicator import Communicator as Communicator
    from renkei.communicators.factory import create_communicator as create_communicator
    from renkei.communicators.membership import Members as Members
    from renkei.communicators.membership import join as join
    from renkei.data.loader import DataLoader as DataLoader
    from renkei.data.scatter import scatter_dataset as scatter_dataset
    from renkei.data.scatter import scatter_index as scatter_index
    from renkei.errors import DeadlineError as DeadlineError
    from renkei.errors import GradientError as GradientError
    from renkei.errors import LaunchError as LaunchError
    from renkei.errors import MismatchError as MismatchError
    from renkei.errors import PeerLostError as PeerLostError
    from renkei.errors import RankFailedError as RankFailedError
    from renkei.errors import RenkeiError as RenkeiError
    from renkei.errors import UnevenBatchError as UnevenBatchError
    from renkei.errors import UsageError as UsageError
    from renkei.gradients.compression.formats import Bf16 as Bf16
    from renkei.gradients.compression.formats import Fp16 as Fp16
    from renkei.gradients.compression.formats import Int8 as Int8
    from renkei.gradients.compression.formats import PowerSgd as PowerSgd
    from renkei.launch.local import run as run
    from renkei.optim.local_updates import LocalUpdates as LocalUpdates
    from renkei.optim.multi_node import MultiNodeOptimizer as MultiNodeOptimizer
    from renkei.optim.outer import outer_average as outer_average
    from renkei.optim.outer import outer_nesterov as outer_nesterov
    from renkei.optim.schedules import post_local as post_local
    from renkei.topology import Topology as Topology
    from renkei.training.batch_norm_statistics import pool_batch_norm as pool_batch_norm
    from renkei.training.evaluation import evaluate as evaluate
    from renkei.training.evaluation import gather_by_sample as gather_by_sample
    from renkei.training.evaluation import predict as predict

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used, so that `import renkei` doesn't wait for torch.
_HOMES = {
    "Bf16": "renkei.gradients.compression.formats",
    "Communicator": "renkei.communicators.communicator",
    "DataLoader": "renkei.data.loader",
    "DeadlineError": "renkei.errors",
    "Fp16": "renkei.gradients.compression.formats",
    "GradientError": "renkei.errors",
    "Int8": "renkei.gradients.compression.formats",
    "LaunchError": "renkei.errors",
    "LocalUpdates": "renkei.optim.local_updates",
    "Members": "renkei.communicators.membership",
    "MismatchError": "renkei.errors",
    "MultiNodeOptimizer": "renkei.optim.multi_node",
    "PeerLostError": "renkei.errors",
    "PowerSgd": "renkei.gradients.compression.formats",
    "RankFailedError": "renkei.errors",
    "RenkeiError": "renkei.errors",
    "Topology": "renkei.topology",
    "UnevenBatchError": "renkei.errors",
    "UsageError": "renkei.errors",
    "create_communicator": "renkei.communicators.factory",
    "evaluate": "renkei.training.evaluation",
    "gather_by_sample": "renkei.training.evaluation",
    "hooks": "renkei",  # a module of its own
    "join": "renkei.communicators.membership",
    "outer_average": "renkei.optim.outer",
    "outer_nesterov": "renkei.optim.outer",
    "pool_batch_norm": "renkei.training.batch_norm_statistics",
    "post_local": "renkei.optim.schedules",
    "predict": "renkei.training.evaluation",
    "run": "renkei.launch.local",
    "scatter_dataset": "renkei.data.scatter",
    "scatter_index": "renkei.data.scatter",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'renkei' has no attribute {name!r}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
