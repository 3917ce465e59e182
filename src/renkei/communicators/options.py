"""What a communicator is configured with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from renkei.communicators.collectives import CPU
from renkei.gradients.buckets import BucketSizes


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a communicator is configured with; `split` and `duplicate` keep it.

    Attributes:
        backend: "gloo" or "nccl".
        device: where this rank computes, and where what it receives is put.
        address: of this host, as the other ranks reach it.
        timeout: seconds after which any wait for another rank fails.
        bucket_sizes: how gradients are cut into messages; None for what suits device and topology.
    """

    backend: str = "gloo"
    device: torch.device = CPU
    address: str = "127.0.0.1"
    timeout: float = 300.0
    bucket_sizes: BucketSizes | None = None
