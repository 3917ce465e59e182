"""How long ranks take to add a buffer, for all who can."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from renkei.bench import contestants
from renkei.bench.bandwidth import COPY, FILLING, AllReduceTime, summarize, sums_in_a_row
from renkei.bench.comparison import random_orders
from renkei.bench.contestants import DTYPES, PEERS, Contestant, Job
from renkei.communicators.communicator import Communicator
from renkei.communicators.factory import create_communicator
from renkei.errors import RenkeiError, UsageError

_EXACT = 256  # up to this, whole numbers are exact in every dtype; and sums reach no more on as many ranks


@contextmanager
def open_contestants(specs: Sequence[str], peers: Sequence[str]) -> Iterator[tuple[Communicator, list[Contestant]]]:
    """All who take turns, and a communicator of the same ranks to arrange them; both are closed afterwards.

    Args:
        specs: communicators as "algorithm" or "algorithm/backend".
        peers: of `renkei.bench.contestants.PEERS`.
    """
    with ExitStack() as stack:
        comms = [stack.enter_context(create_communicator(spec)) for spec in specs]
        for comm in comms:
            if comm.num_addends != comm.size:
                raise UsageError(f"communicator {comm.name!r} doesn't add other ranks' buffers; leave it out")
        arranging = comms[0] if comms else stack.enter_context(create_communicator())
        everyone = [contestants.communicator(comm) for comm in comms]
        everyone += [stack.enter_context(PEERS[peer](arranging)) for peer in peers]
        everyone.append(contestants.copy(arranging))
        yield arranging, list({each.who: each for each in everyone}.values())  # two names may mean the same


def measure(
    comm: Communicator,
    everyone: Sequence[Contestant],
    *,
    dtype: str,
    num_bytes: int,
    rounds: int,
    on_turn: Callable[[], object] = lambda: None,
) -> list[AllReduceTime]:
    """Let all who know the dtype take turns, in a new random order each round, and compare them.

    Args:
        comm: of the ranks that measure.
        num_bytes: of the buffer on each rank; what is left beyond the last whole element is left out.
        rounds: how often each gets its turn.
        on_turn: called after each.

    Raises:
        RenkeiError: a contestant's sum, checked once before it is timed, is wrong; on all ranks.
    """
    kind = DTYPES[dtype]
    numel = num_bytes // kind.itemsize
    in_a_row = sums_in_a_row(num_bytes, comm.size, torch.finfo(kind).max)
    taking_part = {each.who: each for each in everyone if dtype in each.dtypes}
    seconds: dict[tuple[str, str | None], list[float]] = {name: [] for name in taking_part}
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(each.prepare(numel, kind)) for name, each in taking_part.items()}
        for name, job in jobs.items():
            if name != (COPY, None):
                check_sum(comm, "/".join(filter(None, name)), job)
        for order in random_orders(jobs, rounds):
            for name in order:
                seconds[name].append(_take_turn(comm, jobs[name], in_a_row))
                on_turn()
    slowest = {name: comm.all_reduce(torch.tensor(own), "max").tolist() for name, own in seconds.items()}
    peers = [name for name, _ in slowest if name in PEERS]
    return summarize(slowest, peers, dtype=dtype, num_bytes=numel * kind.itemsize, num_ranks=comm.size)


def _take_turn(comm: Communicator, job: Job, in_a_row: int) -> float:
    """How long one of several sums in a row took this rank, in seconds."""
    buffer, add = job
    buffer.fill_(FILLING)  # which grows with each sum
    comm.barrier()
    if in_a_row > 1:
        add()  # not timed: a barrier lets ranks go at moments further apart than a small sum takes
    _synchronize(buffer)
    begin = time.perf_counter()
    for _ in range(in_a_row):
        add()
    _synchronize(buffer)
    return (time.perf_counter() - begin) / in_a_row


def _synchronize(buffer: Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize()


def check_sum(comm: Communicator, name: str, job: Job) -> None:
    """Let a contestant add buffers of whole numbers, of which each rank has others, and compare to what it must be.

    Raises:
        RenkeiError: on all ranks, if it is wrong on any.
    """
    buffer, add = job
    mine, total = _addends(comm.rank, comm.size, buffer)
    buffer.copy_(mine)
    add()
    wrong = (buffer != total).nonzero()
    problem = None
    if len(wrong):
        at = int(wrong[0])
        problem = (
            f"{name} adds wrongly: element {at} of {len(buffer)} {buffer.dtype} on rank {comm.rank} is "
            f"{buffer[at].item()}, but the sum over {comm.size} ranks is {total[at].item()}"
        )
    problems = comm.all_gather_object(problem)
    if any(problems):
        raise RenkeiError(next(filter(None, problems)))


def _addends(rank: int, num_ranks: int, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's whole numbers and the sums of all ranks', of the buffer's length and dtype.

    They recur after an odd number of elements, so that parts of a buffer, which computers like to cut at even ones, can
    only be in the wrong place if that shows.
    """
    period = max(3, (_EXACT // num_ranks - 1) | 1)
    numbers = torch.arange(period, dtype=torch.int64)
    addends = torch.stack([(numbers + each) % period for each in range(num_ranks)])

    def stretch(row: Tensor) -> Tensor:
        return row.to(buffer.device, buffer.dtype).repeat(len(buffer) // period + 1)[: len(buffer)]

    return stretch(addends[rank]), stretch(addends.sum(dim=0))
