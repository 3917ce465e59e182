"""With `virtual_ranks`, a sum has the same bits on any number of ranks that the tree has branches for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from renkei.communicators.sum_by_slices import PIECE, sum_by_slices
from renkei.communicators.summation import add_in_tree
from renkei.testing import run_on_ranks

VIRTUAL = 8
NUMEL = 100_003


def addends(dtype: torch.dtype) -> list[Tensor]:
    """What each virtual rank brings: numbers of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(NUMEL, generator=generator) * 10.0 ** (at % 4)).to(dtype) for at in range(VIRTUAL)]


def summed(name: str, num_ranks: int, dtype: torch.dtype, virtual_ranks: int | None = VIRTUAL) -> Tensor:
    """The sum, when each rank has added its own virtual ranks' in the tree."""

    def run(comm: Any) -> Tensor:
        share = VIRTUAL // comm.size
        own = [each.clone() for each in addends(dtype)[comm.rank * share : (comm.rank + 1) * share]]
        buffer = comm.allocate(NUMEL, dtype, comm.device).copy_(add_in_tree(own))
        comm.start_sum(buffer, [buffer]).wait()
        return buffer.clone()

    first, *others = run_on_ranks(num_ranks, run, communicator=name, virtual_ranks=virtual_ranks, timeout=15.0)
    assert all(torch.equal(first, other) for other in others)
    return first


def check_alike(name: str, dtype: torch.dtype, virtual_ranks: int | None = VIRTUAL) -> None:
    expected = add_in_tree([each.clone() for each in addends(dtype)])
    for num_ranks in (1, 2, 4, 8):
        assert torch.equal(summed(name, num_ranks, dtype, virtual_ranks), expected), num_ranks


@pytest.mark.parametrize("name", ["flat/gloo", "naive/gloo", "flat/shared_memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits_on_any_number_of_ranks(name: str, dtype: torch.dtype) -> None:
    check_alike(name, dtype)


def test_red_twin_in_whatever_order_is_quickest() -> None:
    with pytest.raises(AssertionError):
        check_alike("flat/gloo", torch.float32, virtual_ranks=None)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pieces_of_any_length_are_added_rightly(size: int, dtype: torch.dtype) -> None:
    """Also when several are on their way, and the last is short, or shorter than the number of ranks."""

    def run(comm: Any) -> None:
        channel = comm._network.open("slices")
        for numel in (0, 1, 2, 31, 64, 65, 1000, 1009):
            tensor = torch.arange(numel).remainder(7).to(dtype) + comm.rank
            expected = size * torch.arange(numel).remainder(7) + size * (size - 1) / 2
            sum_by_slices(channel, tensor, "a sum", piece=256)
            assert torch.equal(tensor.double(), expected.double())

    assert PIECE > 256
    run_on_ranks(size, run, communicator="flat/gloo")
