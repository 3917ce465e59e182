"""Running a function on several ranks, for tests: of Renkei and of programs that use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from renkei.communicators.choice import choose
from renkei.communicators.collectives import CPU
from renkei.communicators.communicator import Communicator
from renkei.communicators.factory import COMMUNICATORS
from renkei.communicators.options import Options
from renkei.communicators.requested import read_name
from renkei.errors import UsageError


def run_on_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    communicator: str = "flat",
    nodes: Sequence[str] | None = None,
    timeout: float = 5.0,
    **options: Any,
) -> list[Any]:
    """Call ``fn(comm, *args)`` on ranks that are threads of this process; returns their results by rank.

    Quick, since nothing is started, and enough for all that belongs to a communicator. What belongs to a process does
    not work on threads: the default random generator, the default process group and so DDP, signals, ``os.environ``.
    Seed generators of your own. Where that is not enough, use `renkei.run`.

    Args:
        communicator: name of the algorithm and its backend, as for `renkei.create_communicator`.
        nodes: by rank, the node it pretends to be on.
        timeout: seconds that a rank may wait for another.
        options: further fields of `renkei.communicators.communicator.Options`.

    Raises:
        UsageError: there is no such communicator, or not one node for each of at least one rank.
        what `fn` raised first, on whichever rank; the others are made to stop.
    """
    if num_ranks < 1:
        raise UsageError(f"the number of ranks is {num_ranks}, but must be at least 1")
    if nodes is not None and len(nodes) != num_ranks:
        raise UsageError(f"nodes are given for {len(nodes)} ranks, but there are {num_ranks}")
    chosen = choose(read_name(communicator), nodes or ["node"] * num_ranks, options.get("device", CPU))
    options = {"backend": chosen.backend, "backend_within": chosen.backend_within} | options
    kind = COMMUNICATORS[chosen.algorithm]
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[float, BaseException]] = []
    threads = torch.get_num_threads()

    def body(rank: int) -> None:
        comm: Communicator | None = None
        try:
            comm = kind(
                store,
                rank=rank,
                nodes=nodes or ["node"] * num_ranks,
                options=Options(timeout=timeout, **options),
            )
            results[rank] = fn(comm, *args)
        except BaseException as error:
            failures.append((time.monotonic(), error))
        finally:
            if comm is not None:
                comm.close()

    ranks = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    torch.set_num_threads(threads)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    return results
