"""`renkei.testing.run_on_ranks`: results by rank, the first failure, and an end in seconds."""

from __future__ import annotations

import time

import pytest
import torch

from renkei.communicators.communicator import Communicator
from renkei.errors import DeadlineError, PeerLostError, UsageError
from renkei.testing import run_on_ranks

HANG = 15.0


class BoomError(Exception):
    """Of a test's own."""


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_come_by_rank(size: int) -> None:
    assert run_on_ranks(size, lambda comm, factor: factor * comm.rank, 7) == [7 * rank for rank in range(size)]


def test_options_and_nodes_reach_the_communicator() -> None:
    def look(comm: Communicator) -> tuple[str, float, int]:
        return comm.name, comm.options.timeout, comm.inter_rank

    seen = run_on_ranks(2, look, communicator="naive", nodes=["a", "b"], timeout=3.5)
    assert seen == [("naive", 3.5, 0), ("naive", 3.5, 1)]


def check_first_failure_is_raised(rank: int, size: int) -> None:
    """One rank fails while the others wait for it."""

    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == rank:
            raise BoomError(f"rank {rank}")
        for _ in range(100):
            comm.all_reduce(torch.zeros(3))

    begin = time.monotonic()
    with pytest.raises(BoomError, match=f"rank {rank}"):
        run_on_ranks(size, body, timeout=4 * HANG)
    assert time.monotonic() - begin < HANG


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 3), (3, 4)])
def test_the_first_failure_is_raised_and_the_others_stop(rank: int, size: int) -> None:
    check_first_failure_is_raised(rank, size)


@pytest.mark.parametrize("wait", ["recv", "barrier", "recv_object"])
def test_ranks_that_wait_otherwise_stop_too(wait: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise BoomError
        comm.barrier() if wait == "barrier" else getattr(comm, wait)(1)

    with pytest.raises(BoomError):
        run_on_ranks(3, body, timeout=1.0)


def test_leaving_by_system_exit_is_a_failure_too() -> None:
    with pytest.raises(SystemExit):
        run_on_ranks(2, lambda comm: exit(3) if comm.rank else comm.all_reduce(torch.zeros(1)))


def test_a_rank_that_ends_early_is_an_error_for_those_that_wait() -> None:
    with pytest.raises(PeerLostError):
        run_on_ranks(2, lambda comm: comm.all_reduce(torch.zeros(1)) if comm.rank else None)


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    def body(comm: Communicator) -> None:
        time.sleep(1.0) if comm.rank else comm.all_reduce(torch.zeros(1))

    with pytest.raises(DeadlineError, match=r"all_reduce's header: rank 0 waited 0.2 s .* for rank 1"):
        run_on_ranks(2, body, timeout=0.2)


def test_communicators_are_closed_afterwards() -> None:
    for comm in run_on_ranks(2, lambda comm: comm):
        with pytest.raises(UsageError, match="closed"):
            comm.barrier()


def test_the_number_of_threads_of_torch_is_as_before() -> None:
    before = torch.get_num_threads()
    run_on_ranks(2, lambda comm: torch.set_num_threads(1 + comm.rank))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("size", [0, -1])
def test_no_ranks_are_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"number of ranks is {size}"):
        run_on_ranks(size, lambda comm: None)


def test_an_unknown_communicator_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="flat"):
        run_on_ranks(2, lambda comm: None, communicator="flatt")


def test_nodes_for_another_number_of_ranks_are_an_error() -> None:
    with pytest.raises(UsageError, match="nodes"):
        run_on_ranks(3, lambda comm: None, nodes=["a", "b"])


def test_red_twin_failures_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from renkei import testing

    def swallowing(num_ranks: int, fn: object, **options: object) -> list[None]:
        return [None] * num_ranks

    monkeypatch.setitem(globals(), "run_on_ranks", swallowing)
    with pytest.raises(pytest.fail.Exception):
        check_first_failure_is_raised(0, 2)
    assert testing.run_on_ranks is not swallowing
