"""Finding out, within seconds, which algorithm, bucket size and chunk add gradients quickest where this job runs.

And then how long that takes in each wire format, by which an optimizer may choose one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from renkei.bench.comparison import random_orders
from renkei.bench.exchanging import time_exchanges
from renkei.communicators.communicator import Communicator
from renkei.communicators.factory import create_communicator
from renkei.communicators.tuning import Tuning

TOTAL = 2**24  # bytes of gradients that are added: those of a small network
BUCKETS = (2**20, 2**22, 2**24)  # bytes
CHUNKS = (2**16, 2**18, 2**20)  # bytes
_NEARLY = (
    1.1  # times the shortest time: among bucket sizes no slower than that the smallest is chosen, which leaves first
)
_ROUNDS = 9  # at most
_FOR_CANDIDATES = 0.75  # of the time


@dataclass(frozen=True)
class Candidate:
    """What can be chosen.

    Attributes:
        communicator, bucket_bytes, chunk_bytes: as in `Tuning`.
    """

    communicator: str
    bucket_bytes: int
    chunk_bytes: int | None = None

    def __str__(self) -> str:
        chunk = "" if self.chunk_bytes is None else f", {self.chunk_bytes // 1024} KiB at a time"
        return f"{self.communicator}, {self.bucket_bytes / 2**20:g} MiB buckets{chunk}"


def probe(comm: Communicator, seconds: float) -> Tuning:
    """Let candidates add gradients in turns, choose, and time that in each wire format, for so many seconds in all.

    Args:
        comm: of the ranks that measure.
    """
    begin = time.monotonic()
    with ExitStack() as stack:
        buffers: dict[Candidate, tuple[Communicator, list[Tensor]]] = {}
        for spec in specs_for(comm):
            base = stack.enter_context(create_communicator(spec))
            for chunk in CHUNKS if "shared_memory" in spec else (None,):
                owner = base if chunk is None else base.duplicate(chunk_bytes=chunk)
                for bucket in BUCKETS:
                    buffers[Candidate(spec, bucket, chunk)] = owner, _allocate(owner, bucket)
        seconds_of: dict[Candidate, list[float]] = {candidate: [] for candidate in buffers}
        for order in _rounds(comm, list(buffers), begin + _FOR_CANDIDATES * seconds):
            for candidate in order:
                seconds_of[candidate].append(_add(comm, *buffers[candidate]))
        medians = {candidate: statistics.median(own) for candidate, own in seconds_of.items()}
        slowest = comm.all_reduce(torch.tensor(list(medians.values())), "max").tolist()
        chosen = choose(dict(zip(medians, slowest, strict=True)))
        owner, _ = buffers[Candidate(chosen.communicator, chosen.bucket_bytes, chosen.chunk_bytes)]
        return replace(chosen, exchanges=time_exchanges(owner, chosen.bucket_bytes, begin + seconds))


def specs_for(comm: Communicator) -> list[str]:
    """The communicators that make sense for such ranks."""
    one_node, has_gpus = comm.inter_size == 1, comm.device.type == "cuda"
    specs = ["flat/nccl", "flat/gloo"] if has_gpus else ["flat/shared_memory"] * one_node + ["flat/gloo"]
    if not one_node and comm.inter_size < comm.size:
        backends = ["nccl+nccl", "nccl+gloo"] if has_gpus else ["shared_memory+gloo"]
        specs += [f"{name}/{each}" for name in ("two_dimensional", "hierarchical") for each in backends]
    return specs


def choose(seconds: dict[Candidate, float]) -> Tuning:
    """The quickest, but with the smallest buckets that are nearly as quick."""
    best = min(seconds, key=lambda candidate: seconds[candidate])
    alike = [
        candidate
        for candidate in seconds
        if (candidate.communicator, candidate.chunk_bytes) == (best.communicator, best.chunk_bytes)
        and seconds[candidate] <= _NEARLY * seconds[best]
    ]
    chosen = min(alike, key=lambda candidate: candidate.bucket_bytes)
    return Tuning(
        communicator=chosen.communicator,
        bucket_bytes=chosen.bucket_bytes,
        chunk_bytes=chosen.chunk_bytes,
        measured_on=time.strftime("%Y-%m-%d"),
        total_bytes=TOTAL,
        milliseconds={str(candidate): round(1000 * own, 3) for candidate, own in seconds.items()},
    )


def _rounds(comm: Communicator, candidates: Sequence[Candidate], end: float) -> Iterator[list[Candidate]]:
    """Random orders, the same on all ranks, until rank 0's time is over."""
    for order in random_orders(candidates, _ROUNDS):
        yield order
        if comm.broadcast_object(time.monotonic() > end):
            return


def _allocate(comm: Communicator, bucket: int) -> list[Tensor]:
    return [comm.allocate(bucket // 4, torch.float32, comm.device) for _ in range(TOTAL // bucket)]


def _add(comm: Communicator, owner: Communicator, buffers: Sequence[Tensor]) -> float:
    comm.barrier()
    begin = time.perf_counter()
    for work in [owner.start_sum(buffer, [buffer]) for buffer in buffers]:
        work.wait()
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
