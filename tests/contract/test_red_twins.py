"""The contract's checks are no empty words: with one defect each, injected here, they raise."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import membership, messages, mistakes, movement, reductions
from renkei.communicators import channel, collectives, communicator, headers
from renkei.communicators.barrier import Barrier
from renkei.communicators.channel import Channel, Pending
from renkei.errors import DeadlineError, RenkeiError
from renkei.testing import run_on_ranks
from renkei.topology import Topology


def assert_red(size: int, check: Callable[..., Any], *args: Any, **options: Any) -> None:
    """The check sees the defect, or the communicator does; a rank that is just late is no defect seen."""
    with pytest.raises((AssertionError, RenkeiError, pickle.UnpicklingError, EOFError)) as raised:
        run_on_ranks(size, check, *args, communicator="flat/gloo", timeout=1.0, **options)
    assert not isinstance(raised.value, DeadlineError)


def test_red_twin_a_rank_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Channel.start_reduction

    def twice(self: Channel, tensor: Tensor, reduction: str, doing: str) -> Pending:
        if self.rank == 1 and reduction == "sum":
            tensor.mul_(2)
        return whole(self, tensor, reduction, doing)

    monkeypatch.setattr(Channel, "start_reduction", twice)
    assert_red(2, reductions.check_dtype, torch.float32)
    assert_red(3, reductions.check_start_sum, torch.float32)


def test_red_twin_the_last_element_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Channel.start_reduction

    def all_but_last(self: Channel, tensor: Tensor, reduction: str, doing: str) -> Pending:
        return (
            whole(self, tensor[:-1], reduction, doing) if tensor.numel() > 1 else whole(self, tensor, reduction, doing)
        )

    monkeypatch.setattr(Channel, "start_reduction", all_but_last)
    assert_red(2, reductions.check_dtype, torch.float64)
    assert_red(3, reductions.check_start_sum, torch.float64)


def test_red_twin_one_bucket_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Channel.start_reduction

    def most(self: Channel, tensor: Tensor, reduction: str, doing: str) -> Pending:
        return Pending([]) if tensor.numel() == 8 else whole(self, tensor, reduction, doing)

    monkeypatch.setattr(Channel, "start_reduction", most)
    assert_red(2, reductions.check_start_sum, torch.float32)


@pytest.mark.parametrize("size", [3, 4])
def test_red_twin_16_bits_added_in_16_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ADDED_IN_32_BITS", ())
    assert_red(size, reductions.check_16_bits_are_added_in_32)
    monkeypatch.undo()
    monkeypatch.delitem(collectives._CARRIERS, torch.float16)
    monkeypatch.setattr(collectives, "_AS_THEY_ARE", (*collectives._AS_THEY_ARE, torch.float16))
    assert_red(size, reductions.check_16_bits_are_added_in_32)


def test_red_twin_mean_divided_by_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collectives._from_carrier

    def one_more(carrier: Tensor, like: Tensor, *, mean_over: int) -> Tensor:
        return whole(carrier, like, mean_over=mean_over + (mean_over > 1))

    monkeypatch.setattr(collectives, "_from_carrier", one_more)
    assert_red(2, reductions.check_dtype, torch.float32)


def test_red_twin_conjugate_flag_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_stored(tensor: Tensor) -> Tensor:
        stored = tensor.detach().conj() if tensor.is_conj() else tensor.detach().resolve_neg()
        return stored.contiguous().reshape(-1).view(torch.uint8)

    monkeypatch.setattr(collectives, "as_bytes", as_stored)
    assert_red(2, movement.check_layouts)


def test_red_twin_argument_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1)

    monkeypatch.setattr(collectives, "_to_carrier", in_place)
    assert_red(2, reductions.check_dtype, torch.float32)


def test_red_twin_result_is_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(channel: Channel, tensor: Tensor, doing: str) -> list[Tensor]:
        return [tensor]

    monkeypatch.setattr(Channel, "all_gather_equal", own)
    assert_red(1, movement.check_results_are_own)


def test_red_twin_all_to_all_in_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Channel.all_to_all_split
    monkeypatch.setattr(Channel, "all_to_all_split", lambda *args: whole(*args)[::-1])
    assert_red(3, movement.check_dtype, torch.float32)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("reduction", "reduction"),
        ("root", "root"),
        ("dtype", "dtypes of equal width gathered"),
        ("tensors_hash", "shape of as many elements"),
        ("tensors_hash", "dtype of equal width"),
    ],
)
def test_red_twin_a_field_of_the_header_not_compared(field: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = headers.first_misfit

    def blind(those: Sequence[headers.Header], **options: bool) -> int | None:
        same = {field: getattr(those[0], field)}
        return whole([replace(each, **same) for each in those], **options)

    monkeypatch.setattr(channel, "first_misfit", blind)
    assert_red(2, mistakes.check_refused, {name: mistakes.MISMATCHED[name]})


def test_red_twin_a_refusal_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "check_root", lambda channel, root: None)
    with pytest.raises((AssertionError, IndexError, OverflowError)):
        run_on_ranks(1, mistakes.check_refused, {"root": mistakes.WRONG["broadcast, root too high"]})


def test_red_twin_chunk_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_last(channel: Channel, data: Tensor, root: int, doing: str, chunk: int = collectives.CHUNK) -> None:
        first, *rest = data.split(chunk)
        for piece in [first, *rest[:-1]]:
            channel.start_broadcast(piece, root, doing).wait()
        if rest and channel.rank != root:
            rest[-1].zero_()  # else it is whatever was in memory, and unpickling that may raise anything

    monkeypatch.setattr(collectives, "broadcast_bytes", all_but_last)
    assert_red(2, messages.check_chunks)


def test_red_twin_barrier_opens_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Barrier, "wait", lambda self, timeout: None)
    came, left = zip(*run_on_ranks(3, membership.check_barrier_waits), strict=True)
    assert not max(came) <= min(left)


def test_red_twin_barrier_overlooks_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Barrier, "_verdict_after", lambda self, timeout, prefix: "open")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run_on_ranks(3, membership.check_barrier_names_the_missing)


def test_red_twin_position_plus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Topology.from_nodes

    def shifted(rank: int, nodes: Sequence[str]) -> Topology:
        return whole((rank + 1) % len(nodes), nodes)

    monkeypatch.setattr(Topology, "from_nodes", shifted)
    assert_red(3, membership.check_topology, ["a", "b", "a"], nodes=["a", "b", "a"])


def test_red_twin_split_without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = communicator.Communicator.split
    monkeypatch.setattr(communicator.Communicator, "split", lambda self, color, key=None: whole(self, color))
    assert_red(3, membership.check_split)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_red_twin_duplicate_shares_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator.Communicator, "duplicate", lambda self, **changes: self)
    assert_red(2, membership.check_duplicate)


def test_red_twin_closed_and_still_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "check_open", lambda self: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run_on_ranks(1, membership.check_closed)


def test_red_twin_closed_but_still_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "abandon", lambda self: None)
    with pytest.raises(RenkeiError):
        run_on_ranks(3, membership.check_close_is_noticed, timeout=3.0)
