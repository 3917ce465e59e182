"""Ranks that make different communicators are told so, before they would talk past one another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from exactness.one_process import error_of
from renkei.communicators.communicator import Communicator
from renkei.communicators.factory import COMMUNICATORS
from renkei.communicators.options import Options
from renkei.errors import MismatchError


def make(names: Sequence[str]) -> list[BaseException | None]:
    """What each rank is told."""
    store = dist.HashStore()

    def on_rank(rank: int) -> BaseException | None:
        options = Options(timeout=5.0)
        kind = COMMUNICATORS[names[rank]]
        return error_of(lambda: kind(store, rank=rank, nodes=["node"] * len(names), options=options).close())

    with ThreadPoolExecutor(len(names)) as ranks:
        return list(ranks.map(on_rank, range(len(names))))


def test_the_same_on_all_ranks_is_fine() -> None:
    assert make(["flat"] * 3) == [None] * 3


def check_told_on_all_ranks() -> None:
    errors = make(["flat", "flat", "naive"])
    assert {type(error) for error in errors} == {MismatchError}
    assert {str(error) for error in errors} == {
        "rank 2 has made a communicator naive/gloo on cpu where rank 0 has made flat/gloo on cpu; ask for the same on "
        "every rank, and look whether each rank sees its GPU"
    }


def test_another_algorithm_on_one_rank_is_told_on_all() -> None:
    check_told_on_all_ranks()


def test_red_twin_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "_check_alike", lambda self: None)
    with pytest.raises(AssertionError):
        check_told_on_all_ranks()
