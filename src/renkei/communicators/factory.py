"""Making a communicator for this process: from a name, what the launcher said, and the hardware."""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Hashable, Sequence

import torch

from renkei.communicators.choice import check_virtual_ranks, choose
from renkei.communicators.communicator import Communicator, Options
from renkei.communicators.flat import FlatCommunicator
from renkei.communicators.groups import check_usable, choose_device, own_gpu
from renkei.communicators.hierarchical import HierarchicalCommunicator
from renkei.communicators.job import Job, in_a_job, join
from renkei.communicators.naive import NaiveCommunicator
from renkei.communicators.null import NullCommunicator
from renkei.communicators.requested import AUTO, Requested, read_name
from renkei.communicators.single_node import SingleNodeCommunicator
from renkei.communicators.staged import StagedCommunicator
from renkei.communicators.tuning import Tuning, key_of, recall_together
from renkei.communicators.two_dimensional import TwoDimensionalCommunicator
from renkei.errors import UsageError
from renkei.failures import first_cause
from renkei.gradients.buckets import BucketSizes
from renkei.machine import describe_machine
from renkei.topology import Topology

COMMUNICATORS: dict[str, type[Communicator]] = {
    "flat": FlatCommunicator,
    "hierarchical": HierarchicalCommunicator,
    "naive": NaiveCommunicator,
    "null": NullCommunicator,
    "single_node": SingleNodeCommunicator,
    "staged": StagedCommunicator,
    "two_dimensional": TwoDimensionalCommunicator,
}


def create_communicator(
    name: str = AUTO,
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float = 300.0,
    virtual_ranks: int | None = None,
    failures: bool = True,
) -> Communicator:
    """Join the job this process was started in and return a communicator of all its ranks.

    Which rank of how many this is comes from the launcher (renkei, torchrun, mpiexec, srun, or RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT); a process that none started is rank 0 of 1. Rank 0 says on standard error what was
    chosen.

    Args:
        name: the all-reduce algorithm (`COMMUNICATORS`), or one of ChainerMN's names; with the backend as "flat/gloo",
            or with those within nodes and between them as "two_dimensional/shared_memory+gloo". "auto" is what was
            measured (`renkei bench all-reduce --save`), or else suits the ranks' places and devices.
        backend: "nccl", "gloo", "mpi" or "shared_memory", or two of them, as above.
        device: where this rank computes; by default, and by "cuda", its own GPU among the node's; else "cpu".
        timeout: seconds after which waiting for another rank is an error.
        virtual_ranks: add gradients in the fixed binary tree of as many ranks, whatever the real number, which must be
            this one divided by a power of two.
        failures: in a process a launcher started, let an uncaught exception end the process at once, so that the
            launcher and the other ranks notice (see `renkei.failures.first_cause`).

    Raises:
        UsageError: unknown names, a GPU that isn't there, a backend the device doesn't have or that doesn't reach.
        LaunchError: the launcher's variables contradict one another, or the other ranks can't be found.
    """
    if failures and in_a_job():
        first_cause.install()  # first of all, so that what is wrong below is told in a line, too
    # before joining, which waits for ranks that may have ended over the same mistake
    wanted = read_name(name, backend)
    device = choose_device(device)
    for each in filter(None, (wanted.backend, wanted.backend_within)):
        check_usable(each, device)
    if not 0 < timeout < math.inf:
        raise UsageError(f"timeout is {timeout} s, but must be a number above 0")
    job = join()
    device = own_gpu(device, Topology.from_nodes(job.rank, job.nodes).intra_rank)
    store = torch.distributed.PrefixStore(job.next_prefix(), job.store)
    tuning = None
    if wanted == Requested() and virtual_ranks is None:
        tuning = recall_together(job.rank, store, tuning_key(job.nodes, device))
        wanted = read_name(tuning.communicator) if tuning else wanted
    chosen = choose(wanted, job.nodes, device, in_one_level=virtual_ranks is not None)
    check_virtual_ranks(virtual_ranks, job.size, chosen.algorithm)
    options = Options(
        backend=chosen.backend,
        backend_within=chosen.backend_within,
        device=device,
        address=job.address,
        timeout=timeout,
        bucket_sizes=BucketSizes(first=tuning.bucket_bytes, rest=tuning.bucket_bytes) if tuning else None,
        chunk_bytes=tuning.chunk_bytes if tuning else None,
        virtual_ranks=virtual_ranks,
    )
    comm = COMMUNICATORS[chosen.algorithm](store, rank=job.rank, nodes=job.nodes, options=options)
    atexit.register(_close, weakref.ref(comm), os.getpid())
    _say(comm, job, tuning)
    return comm


def tuning_key(nodes: Sequence[Hashable], device: torch.device) -> str:
    """What tells ranks on these nodes, who compute on such devices, from others in the file of `tuning`."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return key_of(nodes, kind, describe_machine())


def _say(comm: Communicator, job: Job, tuning: Tuning | None) -> None:
    if comm.rank == 0 and comm.size > 1:
        nodes = f"{comm.inter_size} node{'s' * (comm.inter_size > 1)}"
        threads = torch.get_num_threads()
        tuned = f"; as measured on {tuning.measured_on}" if tuning else ""
        print(
            f"renkei: {comm.size} ranks on {nodes}, started by {job.launcher}; {comm.name}/{comm.options.backends}, "
            f"{comm.device}, {threads} thread{'s' * (threads > 1)} a rank{tuned}",
            file=sys.stderr,
            flush=True,
        )


def _close(reference: weakref.ref[Communicator], pid: int) -> None:
    """At exit, so that ranks that still wait for this one notice; a forked process has no connections of its own."""
    comm = reference()
    if comm is not None and os.getpid() == pid:
        comm.close()
