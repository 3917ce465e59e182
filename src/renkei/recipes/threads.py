"""How many threads a rank computes with."""

from __future__ import annotations

import os

import torch

from renkei.communicators.job import join
from renkei.launch.local import threads_per_rank


def set_threads(threads: int | None = None) -> None:
    """Let torch compute with as many threads; without a number with OMP_NUM_THREADS, or with the rank's share of cores.

    To be called before a communicator is created, which says how many there are. Where neither is given, the job is
    joined, to learn how many ranks share this host.
    """
    if threads is None:
        if os.environ.get("OMP_NUM_THREADS"):  # torch has taken it already
            return
        job = join()
        threads = threads_per_rank(job.nodes.count(job.nodes[job.rank]))
    torch.set_num_threads(threads)
