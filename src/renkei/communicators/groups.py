"""Making a process group of torch that belongs to one communicator: no default group, no names shared with others."""

from __future__ import annotations

import os
import uuid
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName

from renkei.communicators.backends.process_group import TransportGroup
from renkei.communicators.backends.shared_memory.transport import SharedMemoryTransport
from renkei.communicators.channel import translate
from renkei.communicators.platforms import check_shared_memory
from renkei.communicators.reduction import CHUNK
from renkei.communicators.requested import BACKENDS
from renkei.communicators.timeouts import milliseconds
from renkei.errors import MismatchError, RenkeiError, UsageError
from renkei.names import check_known


def check_usable(backend: str, device: torch.device) -> None:
    """Raise `UsageError` if a backend can't work for a rank that computes on such a device."""
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UsageError(f"backend 'nccl' needs GPUs, but this rank computes on {device}; use backend='gloo'")
    if backend == "shared_memory":
        check_shared_memory()


def check_reaches(backend: str, nodes: Sequence[Hashable]) -> None:
    """Raise `UsageError` if ranks are to talk through shared memory that aren't on one host."""
    if backend == "shared_memory" and len(set(nodes)) > 1:
        raise UsageError(
            f"backend 'shared_memory' is for the ranks of one node, but there are {len(set(nodes))} nodes; use "
            "'two_dimensional/shared_memory+gloo', which uses it within each, or backend='gloo'"
        )


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or a GPU, or the CPU; a GPU without a number is still to be numbered by `own_gpu`.

    Raises:
        UsageError: it is neither the CPU nor a GPU that this process sees.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if num_gpus else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"device is {str(device)!r}, but must be 'cpu', 'cuda' or a GPU such as 'cuda:0'")
    if chosen.type == "cuda" and (chosen.index or 0) >= num_gpus:
        raise UsageError(
            f"device is {str(device)!r}, but this process sees {num_gpus} GPUs; use one it sees, or device='cpu'"
        )
    return chosen


def own_gpu(device: torch.device, intra_rank: int) -> torch.device:
    """The device with the number of this rank's GPU, if it is a GPU without one.

    Where a launcher shows each rank one GPU only, that one is number 0 for every rank.
    """
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", intra_rank % torch.cuda.device_count())
    return device


def device_identity(device: torch.device) -> str:
    """A text that is equal for two ranks only if they use the same GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_made_alike(made: list[str]) -> None:
    """Raise `MismatchError` unless all ranks have made the same communicator, as each describes its own."""
    for rank, its in enumerate(made):
        if its != made[0]:
            raise MismatchError(
                f"rank {rank} has made a communicator {its} where rank 0 has made {made[0]}; ask for the same on every "
                "rank, and look whether each rank sees its GPU"
            )


def check_one_rank_per_gpu(identities: list[str]) -> None:
    """NCCL can't have two ranks on one GPU, and says so in words of its own or not at all."""
    for rank, identity in enumerate(identities):
        if identity and identity in identities[:rank]:
            other = identities.index(identity)
            raise UsageError(
                f"ranks {other} and {rank} use the same GPU, which NCCL refuses; start as many ranks per node as it "
                "has GPUs, or use backend='gloo'"
            )


def create_group(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    backend: str,
    device: torch.device,
    address: str,
    timeout: float,
    num_threads: int,
    chunk: int | None = None,
) -> ProcessGroup:
    """A group of `size` ranks that find one another in `store`, which must be empty.

    With backends "shared_memory" and "mpi" all tensors travel by a transport of ours; with "gloo" by Gloo; with "nccl",
    those of `device` by NCCL and others by Gloo.

    Args:
        address: of this host, as the other ranks reach it.
        timeout: seconds after which waiting for another rank fails.
        num_threads: how many messages Gloo works on at a time.
        chunk: bytes that are added at a time in shared memory; None for what suits most.

    Raises:
        UsageError: the backend is unknown.
        PeerLostError, DeadlineError: another rank ended, or did not come.
    """
    check_known("backend", backend, BACKENDS)
    store = dist.PrefixStore("group", store)
    store.set_timeout(milliseconds(timeout))
    name = f"renkei-{uuid.uuid4()}"  # local to this process; ranks may share one (threads)
    try:
        if backend == "shared_memory":
            transport = SharedMemoryTransport(store, rank=rank, size=size, timeout=timeout, chunk=chunk or CHUNK)
            group: ProcessGroup = TransportGroup(transport)
        elif backend == "mpi":
            from renkei.communicators.backends.mpi.transport import create_mpi_transport  # needs mpi4py

            group = TransportGroup(create_mpi_transport(store, rank, size, timeout))
        else:
            group = _gloo_and_nccl(store, rank, size, backend, device, _gloo_options(address, timeout, num_threads))
    except RenkeiError:
        raise
    except RuntimeError as error:
        raise translate(error, rank=rank, doing="connecting to the other ranks") from None
    if isinstance(group, TransportGroup):
        group.setGroupName(name)
    else:
        group._set_group_name(GroupName(name))
    return group


def _gloo_and_nccl(
    store: dist.Store, rank: int, size: int, backend: str, device: torch.device, options: Any
) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    gloo = ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    default = ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), default, gloo)
    if device.type == "cuda":
        on_gpus: Any = gloo
        if backend == "nccl":
            default, on_gpus = ProcessGroup.BackendType.NCCL, _nccl(store, rank, size, options._timeout)
        group._register_backend(torch.device("cuda"), default, on_gpus)
    group._set_default_backend(default)
    return group


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)


def _gloo_options(address: str, timeout: float, num_threads: int) -> Any:
    options = cast(Any, ProcessGroupGloo)._Options()  # torch's annotations don't know it
    options._timeout = milliseconds(timeout)
    options._threads = num_threads
    # By address, not by this host's name, which often resolves to 127.0.1.1 or to nothing.
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    device = (
        ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        if interface
        else ProcessGroupGloo.create_device(hostname=address)
    )
    options._devices = [device]
    return options
