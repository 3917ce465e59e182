"""How long a communicator takes to exchange gradients in each wire format, with nothing else to do."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from renkei.bench.comparison import random_orders
from renkei.communicators.communicator import Communicator
from renkei.communicators.exchange_times import ExchangeTimes
from renkei.gradients.compression.formats import read_format
from renkei.optim.wire_choice import WIRES

NUMBERS = (2**18, 2**21)  # of gradients: 1 MiB and 8 MiB of them
_ROUNDS = 9  # at most

Case = tuple[str, int]  # wire format and number


def time_exchanges(comm: Communicator, bucket_bytes: int, end: float) -> ExchangeTimes:
    """Let wire formats take turns until some time is reached, but once at least after warming up.

    Args:
        comm: whose ranks exchange.
        bucket_bytes: of gradients that are sent as one message.
        end: by rank 0's ``time.monotonic()``.
    """
    comm.prepare_compressed_sums()
    exchanges = {(wire, number): _Exchange(comm, wire, number, bucket_bytes) for wire in WIRES for number in NUMBERS}
    took: dict[Case, list[tuple[float, float]]] = {case: [] for case in exchanges}
    for exchange in exchanges.values():
        _time(comm, exchange)
    for order in random_orders(exchanges, _ROUNDS):
        for case in order:
            took[case].append(_time(comm, exchanges[case]))
        if comm.broadcast_object(time.monotonic() > end):
            break
    medians = [[statistics.median(each) for each in zip(*own, strict=True)] for own in took.values()]
    slowest = comm.all_reduce(torch.tensor(medians, dtype=torch.float64), "max").mul(1000).tolist()
    found = dict(zip(took, slowest, strict=True))
    whole, worked = (
        {wire: [round(found[wire, number][which], 3) for number in NUMBERS] for wire in WIRES} for which in (0, 1)
    )
    return ExchangeTimes(list(NUMBERS), whole, worked)


class _Exchange:
    """So many gradients, in buckets, each time the same ones."""

    def __init__(self, comm: Communicator, wire: str, number: int, bucket_bytes: int) -> None:
        per_bucket = bucket_bytes // 4
        sizes = [min(per_bucket, number - begin) for begin in range(0, number, per_bucket)]
        self._comm = comm
        self._wires = [read_format(wire).make_wire([torch.Size([size])]) for size in sizes]
        self._gradients = _gradients(max(sizes), comm)
        self._buffers = [comm.allocate(size, torch.float32, comm.device) for size in sizes]

    def fill(self) -> None:
        """Put the gradients into the buckets."""
        for buffer in self._buffers:
            torch.mul(self._gradients[: len(buffer)], 1 / self._comm.size, out=buffer)

    def run(self) -> None:
        """Replace them by their sums."""
        pairs = zip(self._wires, self._buffers, strict=True)
        for work in [wire.start_sum(self._comm, buffer, [buffer]) for wire, buffer in pairs]:
            work.wait()


def _gradients(number: int, comm: Communicator) -> Tensor:
    random = torch.Generator().manual_seed(comm.rank)
    return torch.randn(number, generator=random, device="cpu").to(comm.device)


def _time(comm: Communicator, exchange: _Exchange) -> tuple[float, float]:
    """Seconds it takes, and for how many of them this rank's processor works where it is what computes."""
    on_gpu = comm.device.type == "cuda"
    exchange.fill()
    comm.barrier()
    begin, worked = time.perf_counter(), time.process_time()
    exchange.run()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, 0.0 if on_gpu else time.process_time() - worked
