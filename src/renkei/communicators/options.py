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
        backend: by which messages travel, those between nodes if there are several: "gloo", "nccl", "mpi" or
            "shared_memory".
        backend_within: by which the messages of two-level algorithms travel within a node; None for the same.
        device: where this rank computes, and where what it receives is put.
        address: of this host, as the other ranks reach it.
        timeout: seconds after which any wait for another rank fails.
        bucket_sizes: how gradients are cut into messages; None for what suits device and topology.
        chunk_bytes: how much is added at a time, where we add; None for what suits most.
        virtual_ranks: add in the fixed binary tree of as many ranks, whatever the number of real ones: their number
            times a power of two. None for whatever order is quickest.
    """

    backend: str = "gloo"
    backend_within: str | None = None
    device: torch.device = CPU
    address: str = "127.0.0.1"
    timeout: float = 300.0
    bucket_sizes: BucketSizes | None = None
    chunk_bytes: int | None = None
    virtual_ranks: int | None = None

    @property
    def backends(self) -> str:
        """The name of the backend, or of both: "shared_memory+gloo" is the first within nodes and Gloo between them."""
        return self.backend if self.backend_within is None else f"{self.backend_within}+{self.backend}"

    def sizes_of_buckets(self, num_nodes: int) -> BucketSizes:
        """How gradients are cut into messages."""
        if self.bucket_sizes is not None:
            return self.bucket_sizes
        if self._computes_where_it_communicates(num_nodes):
            return BucketSizes(first=2**22, rest=2**22)
        return BucketSizes()

    def num_threads(self, num_nodes: int) -> int:
        """How many messages Gloo works on at a time."""
        return 1 if self._computes_where_it_communicates(num_nodes) else 2

    def _computes_where_it_communicates(self, num_nodes: int) -> bool:
        """Whether the cores that compute also move every byte: CPU ranks of one host.

        Little is gained there by sending while computing, and each further message or thread costs.
        """
        return num_nodes == 1 and self.device.type == "cpu"
