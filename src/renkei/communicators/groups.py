"""Making a process group of torch that belongs to one communicator: no default group, no names shared with others."""

from __future__ import annotations

import os
import uuid
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName

from renkei.communicators.channel import milliseconds, translate
from renkei.errors import MismatchError, UsageError
from renkei.names import check_known

BACKENDS = ("gloo", "nccl")


def choose_backend(backend: str | None, device: torch.device) -> str:
    """The backend asked for, one of `BACKENDS`, or the fastest there is for the device."""
    if backend is None:
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UsageError(f"backend 'nccl' needs GPUs, but this rank computes on {device}; use backend='gloo'")
    return backend


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
) -> ProcessGroup:
    """A group of `size` ranks that find one another in `store`, which must be empty.

    CPU tensors travel over Gloo; with backend "nccl", those of `device` over NCCL.

    Args:
        address: of this host, as the other ranks reach it.
        timeout: seconds after which waiting for another rank fails.
        num_threads: how many messages Gloo works on at a time.

    Raises:
        UsageError: the backend is unknown.
        PeerLostError, DeadlineError: another rank ended, or did not come.
    """
    check_known("backend", backend, BACKENDS)
    store = dist.PrefixStore("group", store)
    store.set_timeout(milliseconds(timeout))
    group = ProcessGroup(store, rank, size)
    try:
        options = _gloo_options(address, timeout, num_threads)
        gloo = ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    except RuntimeError as error:
        raise translate(error, rank=rank, doing="connecting to the other ranks") from None
    default = ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), default, gloo)
    if device.type == "cuda":
        on_gpus: Any = gloo
        if backend == "nccl":
            default, on_gpus = ProcessGroup.BackendType.NCCL, _nccl(store, rank, size, timeout)
        group._register_backend(torch.device("cuda"), default, on_gpus)
    group._set_default_backend(default)
    group._set_group_name(GroupName(f"renkei-{uuid.uuid4()}"))  # local to this process; ranks may share one (threads)
    return group


def _nccl(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = milliseconds(timeout)
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
