"""Renkei: distributed deep learning on PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from renkei.communicators.communicator import Communicator as Communicator
    from renkei.communicators.factory import create_communicator as create_communicator
    from renkei.errors import RenkeiError as RenkeiError
    from renkei.launch.local import run as run
    from renkei.optim.multi_node import MultiNodeOptimizer as MultiNodeOptimizer
    from renkei.topology import Topology as Topology

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used, so that `import renkei` doesn't wait for torch.
_HOMES = {
    "Communicator": "renkei.communicators.communicator",
    "MultiNodeOptimizer": "renkei.optim.multi_node",
    "RenkeiError": "renkei.errors",
    "Topology": "renkei.topology",
    "create_communicator": "renkei.communicators.factory",
    "run": "renkei.launch.local",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'renkei' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
