"""What shared memory does beyond the contract: at every size and place the same sums, and nothing left of it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators import reduction
from renkei.communicators.backends.shared_memory import mail, memory, transport
from renkei.communicators.backends.shared_memory.memory import Memory
from renkei.communicators.backends.shared_memory.transport import SharedMemoryTransport
from renkei.communicators.summation import add_in_tree, widened
from renkei.errors import DeadlineError, MismatchError, PeerLostError, UsageError

# Bytes of small messages, of a chunk and of all banks, so small that lengths go over all their edges.
SMALL, CHUNK, BANKS = 256, 512, 4096
LENGTHS = [0, 1, 63, 64, 65, 255, 512, 513, 1025, 1537, 5000]  # elements
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.fixture(autouse=True)
def _small_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SMALL", SMALL), ("BANKS", BANKS)):
        monkeypatch.setattr(transport, name, value)


def on_ranks(size: int, run: Callable[[SharedMemoryTransport], Any], timeout: float = 5.0) -> list[Any]:
    """Call with each rank's transport; returns results, or exceptions, by rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            made = SharedMemoryTransport(store, rank=rank, size=size, timeout=timeout, chunk=CHUNK)
            try:
                results[rank] = run(made)
            finally:
                made.interrupt()
                made.close()
        except Exception as error:
            results[rank] = error

    ranks = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return results


def checked(results: Sequence[Any]) -> Sequence[Any]:
    errors = [result for result in results if isinstance(result, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerLostError)):  # which follow from others
        raise error
    return results


def parts_of(size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """By rank, numbers of which sums depend on the order."""
    generator = torch.Generator().manual_seed(numel)
    scale = 3 if not dtype.is_floating_point else 10
    return [(torch.rand(numel, generator=generator) * scale ** (1 + rank % 3)).to(dtype) for rank in range(size)]


def summed(parts: Sequence[Tensor]) -> Tensor:
    return add_in_tree([part.clone() for part in widened(parts)]).to(parts[0].dtype)


def check_sums(size: int, place: str) -> None:
    """The same bits on all ranks, those of a tree, whether tensors are in shared memory or not, or here and there."""

    def run(made: SharedMemoryTransport) -> None:
        for dtype in DTYPES:
            for numel in LENGTHS:
                parts = parts_of(size, numel, dtype)
                tensor = parts[made.rank].clone()
                if place != "private":
                    shared = made.allocate(numel + 16, dtype)[16 * (place == "inside") :][:numel]
                    if place != "here and there" or made.rank % 2:
                        tensor = shared.copy_(tensor)
                made.all_reduce(tensor, "sum")
                assert torch.equal(tensor, summed(parts)), (dtype, numel)

    checked(on_ranks(size, run))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("place", ["private", "shared", "inside", "here and there"])
def test_sums(size: int, place: str) -> None:
    check_sums(size, place)


def check_slices(size: int, num_slices: int, in_shared_memory: bool) -> None:
    """Reduced to slices and gathered again, a tensor is the sum."""

    def run(made: SharedMemoryTransport) -> None:
        for dtype in DTYPES:
            for numel in LENGTHS:
                parts = parts_of(size, numel, dtype)
                tensor = made.allocate(numel, dtype) if in_shared_memory else torch.empty(numel, dtype=dtype)
                tensor.copy_(parts[made.rank])
                made.reduce_slices(tensor, num_slices)
                made.gather_slices(tensor, num_slices)
                assert torch.equal(tensor, summed(parts)), (dtype, numel)

    checked(on_ranks(size, run))


@pytest.mark.parametrize(("size", "num_slices"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3)])
@pytest.mark.parametrize("in_shared_memory", [True, False])
def test_slices(size: int, num_slices: int, in_shared_memory: bool) -> None:
    check_slices(size, num_slices, in_shared_memory)


def test_red_twin_banks_not_taken_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that writes where another may still read: at once seen where one of them is slow."""
    meet = SharedMemoryTransport._end_turn

    def without_turns(self: SharedMemoryTransport, doing: str) -> None:
        meet(self, doing)
        self._turn = 0
        if self.rank == 0:
            threading.Event().wait(0.002)

    monkeypatch.setattr(SharedMemoryTransport, "_end_turn", without_turns)
    with pytest.raises((AssertionError, MismatchError)):
        check_sums(2, "private")


def test_red_twin_a_result_not_written_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reduction.reduce_in_chunks

    def to_first(parts: Any, results: Any, *arguments: Any) -> None:
        whole(parts, results[:1], *arguments)

    monkeypatch.setattr(transport, "reduce_in_chunks", to_first)
    with pytest.raises((AssertionError, PeerLostError)):
        check_sums(2, "shared")


def test_red_twin_sums_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(parts: Sequence[Tensor], combine: Callable[..., Tensor]) -> Tensor:
        for part in parts[1:]:
            combine(parts[0], part, out=parts[0])
        return parts[0]

    monkeypatch.setattr(reduction, "add_in_tree", in_order)
    with pytest.raises(AssertionError):
        check_sums(5, "shared")


def mapped() -> int:
    """How many mappings of shared memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:renkei")


def check_freed() -> None:
    def run(made: SharedMemoryTransport) -> None:
        before = made.allocate(3, torch.float32)
        made.barrier()
        num_mapped = mapped()
        made.barrier()
        kept = made.allocate(100_000, torch.float32)[7:9]
        del kept
        gc.collect()
        made.barrier()
        assert mapped() == num_mapped
        made.barrier()
        assert before.tolist() == [0, 0, 0]

    gc.collect()
    before = mapped()
    checked(on_ranks(3, run))
    gc.collect()
    assert mapped() == before


def test_memory_is_freed_with_its_last_view_and_all_of_it_in_the_end() -> None:
    check_freed()


def test_red_twin_memory_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    whole = Memory.allocate

    def hold(self: Memory, numel: int, dtype: torch.dtype) -> Tensor:
        held.append(whole(self, numel, dtype))
        return held[-1]

    monkeypatch.setattr(Memory, "allocate", hold)
    with pytest.raises(AssertionError):
        check_freed()


def test_calls_that_do_not_fit_are_one_error_on_all_ranks_and_nothing_is_broken() -> None:
    def run(made: SharedMemoryTransport) -> str:
        tensor = torch.ones(3 if made.rank < 2 else 5)
        with pytest.raises(MismatchError) as caught:
            made.all_reduce(tensor, "sum")
        with pytest.raises(MismatchError):
            made.all_reduce(tensor, "max") if made.rank else made.barrier()
        made.all_reduce(good := torch.ones(1000), "sum")
        assert good.eq(3).all()
        return str(caught.value)

    (text,) = set(checked(on_ranks(3, run)))
    assert text.startswith(
        "rank 0 calls all_reduce (sum, float32, 12 bytes); rank 2 calls all_reduce (sum, float32, 20 bytes)"
    )


def test_sizes_of_all_to_all_that_do_not_fit_are_told_on_all_ranks() -> None:
    def run(made: SharedMemoryTransport) -> str:
        sizes = [1, 2] if made.rank == 0 else [1, 1]
        data = torch.zeros(sum(sizes), dtype=torch.uint8)
        with pytest.raises(MismatchError) as caught:
            made.all_to_all(torch.zeros(2, dtype=torch.uint8), data, [1, 1], sizes)
        return str(caught.value)

    assert set(checked(on_ranks(2, run))) == {"rank 0 sends 2 bytes to rank 1, which expects 1"}


@pytest.mark.parametrize("numel", [3, 5000])
def test_a_rank_that_leaves_is_named_with_the_operation(numel: int) -> None:
    def run(made: SharedMemoryTransport) -> str | None:
        made.barrier()
        if made.rank == 1:
            return None
        for _ in range(2):  # known, it is told at once
            with pytest.raises(PeerLostError) as caught:
                made.all_reduce(torch.zeros(numel), "sum")
        return str(caught.value)

    texts = checked(on_ranks(3, run))
    assert any(f"rank {rank} lost rank 1 in all_reduce" in str(texts[rank]) for rank in (0, 2))


def test_a_rank_that_does_not_come_is_named_with_the_operation() -> None:
    def run(made: SharedMemoryTransport) -> str | None:
        if made.rank == 2:
            threading.Event().wait(0.5)
            return None
        with pytest.raises((DeadlineError, PeerLostError)) as caught:
            made.all_reduce(torch.zeros(3), "sum")
        return str(caught.value)

    texts = checked(on_ranks(3, run, timeout=0.2))
    assert any("waited 0.2 s in all_reduce for rank 2; look at" in str(text) for text in texts)


def test_a_message_that_breaks_off_is_told_at_once() -> None:
    def run(made: SharedMemoryTransport) -> None:
        if made.rank == 1:
            stream = made._mail._streams[0]
            stream.sendall(mail._HEAD.pack(5, 10**7) + bytes(1000))
            stream.close()
            return
        transfer = made.recv(torch.empty(10**7, dtype=torch.uint8), 1, 5)
        transfer.wait(30.0)

    begin = time.monotonic()
    error = on_ranks(2, run)[0]
    assert isinstance(error, PeerLostError)
    assert "rank 0 lost rank 1 in recv" in str(error)
    assert time.monotonic() - begin < 10


def test_nothing_stays_open_where_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    on_ranks(3, lambda made: None)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        assert all(isinstance(error, UsageError) for error in on_ranks(3, lambda made: None))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
