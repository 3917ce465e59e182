"""Which algorithm over which backends suits what is asked for, and where the ranks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from renkei.communicators.platforms import has_shared_memory
from renkei.communicators.requested import TWO_LEVEL, Requested
from renkei.errors import UsageError


@dataclass(frozen=True)
class Chosen:
    """The same with nothing left open; only two-level algorithms have a backend within nodes."""

    algorithm: str
    backend: str
    backend_within: str | None = None

    def __str__(self) -> str:
        return str(Requested(self.algorithm, self.backend, self.backend_within))


def choose(wanted: Requested, nodes: Sequence[Hashable], device: torch.device, *, in_one_level: bool = False) -> Chosen:
    """What suits what is asked for, and ranks on these nodes that compute on such devices.

    Args:
        in_one_level: all ranks' buffers must be added in one order.
    """
    ranks_per_node = Counter(nodes)
    within = "nccl" if _has_nccl(device) else "shared_memory" if has_shared_memory() else "gloo"
    between = "nccl" if _has_nccl(device) else "gloo"
    algorithm = wanted.algorithm
    if algorithm is None:
        has_levels = len(ranks_per_node) > 1 and max(ranks_per_node.values()) > 1
        two_level = wanted.backend is None and has_levels and within != between and not in_one_level
        algorithm = "two_dimensional" if two_level or wanted.backend_within else "flat"
    if algorithm in TWO_LEVEL:
        return Chosen(algorithm, wanted.backend or between, wanted.backend_within or within)
    return Chosen(algorithm, wanted.backend or (within if len(ranks_per_node) == 1 else between))


def check_virtual_ranks(virtual_ranks: int | None, num_ranks: int, algorithm: str) -> None:
    """Raise `UsageError` if the tree of so many ranks has no place for this number of them, or isn't to be had."""
    if virtual_ranks is None:
        return
    share, rest = divmod(virtual_ranks, num_ranks)
    if rest or share < 1 or share & (share - 1):
        raise UsageError(
            f"virtual_ranks is {virtual_ranks}, but must be the number of ranks, {num_ranks}, times a power of two: "
            "only then has each rank a branch of the tree"
        )
    if algorithm in TWO_LEVEL:
        raise UsageError(
            f"virtual_ranks asks for one order of adding, but {algorithm!r} has one for each node; use 'flat'"
        )


def _has_nccl(device: torch.device) -> bool:
    return device.type == "cuda" and dist.is_nccl_available()
