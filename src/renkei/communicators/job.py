"""This process's place in its job: found out once, kept until the process ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import socket
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from renkei.communicators.backends.mpi.implementation import load as load_mpi
from renkei.communicators.backends.mpi.meeting import within
from renkei.communicators.backends.mpi.rendezvous import agree_where
from renkei.communicators.channel import translate
from renkei.communicators.timeouts import milliseconds
from renkei.errors import LaunchError
from renkei.launch import farewell, rendezvous
from renkei.launch.environments import LaunchEnvironment, detect

_FILES_PER_RANK = 16  # two for the job and one for each communicator; more than most scripts need
_ASSEMBLY_SECONDS = 300.0  # for all ranks to come
_ASSEMBLY_VARIABLE = "RENKEI_ASSEMBLY_SECONDS"  # changes that


@dataclass(frozen=True)
class Job:
    """A job as one of its ranks knows it.

    Attributes:
        launcher: who started it.
        rank, size: this process among all.
        nodes: by rank, something that tells its node.
        address: of this host, as the other ranks reach it.
        store: where ranks leave what others need to begin talking.
    """

    launcher: str
    rank: int
    size: int
    nodes: tuple[str, ...]
    address: str
    store: dist.Store

    def next_prefix(self) -> str:
        """A name for the next communicator: the same on all ranks if they create them in the same order."""
        return f"communicator/{self.store.add(f'communicators/{self.rank}', 1)}"


def in_a_job() -> bool:
    """Whether a launcher started this process; also if what it said makes no sense."""
    try:
        return detect(os.environ).is_distributed
    except LaunchError:
        return True


@functools.cache
def join() -> Job:
    """Meet the other ranks of the job this process was started in.

    There is one job for each process, so it is joined once and its store is kept until the process ends.
    """
    timeout = _assembly_seconds()
    environment = detect(os.environ)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        # a connection of our own, for the timeout of the default group's is the user's
        default: Any = dist.distributed_c10d._get_default_store()
        store: dist.Store = dist.PrefixStore("renkei", default.clone())
    else:
        rank, size = environment.rank, environment.size
        store = _open_store(environment, timeout)
    store.set_timeout(milliseconds(timeout))
    try:
        return _introduce(environment, rank, size, store)
    except RuntimeError as error:
        raise translate(error, rank=rank, doing="meeting the other ranks") from None


def _assembly_seconds() -> float:
    text = os.environ.get(_ASSEMBLY_VARIABLE)
    if text is None:
        return _ASSEMBLY_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"{_ASSEMBLY_VARIABLE}={text!r} must be a number of seconds above 0")
    return seconds


def _introduce(environment: LaunchEnvironment, rank: int, size: int, store: dist.Store) -> Job:
    """Learn where the other ranks run. Rank 0 collects, so that a thousand ranks don't read a thousand keys each."""
    store.set(f"place/{rank}", json.dumps([socket.gethostname(), environment.node]))
    if rank == 0:
        places = [json.loads(store.get(f"place/{other}")) for other in range(size)]
        store.set("places", json.dumps(places))
    places = json.loads(store.get("places"))
    nodes = tuple(f"{host}/{node}" for host, node in places)
    one_host = len({host for host, _ in places}) == 1
    return Job(
        launcher=environment.launcher,
        rank=rank,
        size=size,
        nodes=nodes,
        address="127.0.0.1" if one_host else address_towards(environment.address),
        store=store,
    )


def _open_store(environment: LaunchEnvironment, timeout: float) -> dist.Store:
    if environment.size == 1:
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun holds a store at the master's address
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"renkei/{restart}", _connect(environment.address, environment.port, timeout))
    is_ours = environment.launcher == "renkei"  # else it may be a job that a rank of ours has started
    listener = rendezvous.inherited_listener() if is_ours and environment.rank == 0 else None
    if environment.address is None:
        environment, listener = _meet_over_mpi(environment, timeout)
    if environment.rank != 0:
        port, connection = rendezvous.join(environment, timeout)
        atexit.register(farewell.leave, connection, os.getpid())
        store = _connect(environment.address, port, timeout)
    else:
        store, guests = _serve(environment, listener, timeout)
        atexit.register(farewell.leave_last, guests, os.getpid())
    return dist.PrefixStore("renkei", store)


def _serve(
    environment: LaunchEnvironment, listener: socket.socket | None, timeout: float
) -> tuple[dist.Store, dict[int, socket.socket]]:
    """Rank 0: hold the store, at a port the kernel chooses, and tell the others; returns the connections to them."""
    assert environment.address is not None
    assert environment.port is not None
    _allow_connections(environment.size)
    with listener or rendezvous.open_listener(environment.address, environment.port) as meeting_place:
        for_store = rendezvous.open_listener(environment.address, 0)
        port = for_store.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=milliseconds(timeout),
            wait_for_workers=False,
            master_listen_fd=for_store.detach(),
        )
        return store, rendezvous.host(environment, meeting_place, port, timeout)


def _allow_connections(num_ranks: int) -> None:
    """Let this process have as many files open as many ranks connect with; most systems begin with 1,024."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits, or no way to change them
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < _FILES_PER_RANK * num_ranks:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _connect(address: str | None, port: int | None, timeout: float) -> dist.Store:
    assert address is not None
    assert port is not None
    return dist.TCPStore(address, port, is_master=False, timeout=milliseconds(timeout), wait_for_workers=False)


def _meet_over_mpi(environment: LaunchEnvironment, timeout: float) -> tuple[LaunchEnvironment, socket.socket | None]:
    """Let rank 0 choose a port and MPI tell the others."""
    try:
        world = load_mpi().COMM_WORLD
    except LaunchError as error:
        raise LaunchError(
            f"rank {environment.rank}: started by mpiexec, but how to find the other ranks isn't known: {error}; or "
            "set MASTER_ADDR and MASTER_PORT"
        ) from None
    if (world.rank, world.size) != (environment.rank, environment.size):
        raise LaunchError(
            f"mpiexec says this is rank {environment.rank} of {environment.size}, mpi4py says {world.rank} of "
            f"{world.size}: they belong to different MPIs; use the mpiexec of the MPI that mpi4py loads"
        )
    doing = f"rank {world.rank}: meeting the {world.size} ranks of MPI"
    address, port, listener = within(timeout, lambda: agree_where(world), doing)
    return replace(environment, address=address, port=port), listener


def address_towards(address: str | None) -> str:
    """This host's address on the way to another host. No packet is sent: connecting UDP only asks the routing table."""
    outside = "192.0.2.1"  # reserved for documentation (RFC 5737): stands for anywhere else
    for target in filter(None, (address, outside)):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            own: str = probe.getsockname()[0]
            if not rendezvous.is_loopback(own):
                return own
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return "127.0.0.1"  # not used: the interface is named
    raise LaunchError(
        f"found no address of {socket.gethostname()} that other hosts reach; set GLOO_SOCKET_IFNAME to the interface "
        "they do"
    )
