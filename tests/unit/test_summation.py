"""Adding in a fixed binary tree, and cutting into slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from renkei.communicators.summation import add_in_tree, slices, widened


def make(num_parts: int, numel: int = 37) -> list[Tensor]:
    """Parts whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(num_parts)
    return [torch.randn(numel, generator=generator) * 10.0 ** (at % 5) for at in range(num_parts)]


def clones(parts: list[Tensor]) -> list[Tensor]:
    return [part.clone() for part in parts]


def check_branches(num_parts: int, branch: int) -> None:
    """Whoever holds an aligned group of parts may add it beforehand: not a bit of the sum changes."""
    parts = make(num_parts)
    whole = add_in_tree(clones(parts))
    branches = [add_in_tree(clones(parts[at : at + branch])) for at in range(0, num_parts, branch)]
    assert torch.equal(add_in_tree(branches), whole)


@pytest.mark.parametrize(("num_parts", "branch"), [(8, 1), (8, 2), (8, 4), (8, 8), (12, 4), (6, 2), (5, 2), (7, 4)])
def test_a_branch_may_be_added_beforehand(num_parts: int, branch: int) -> None:
    check_branches(num_parts, branch)


def test_red_twin_groups_that_are_no_branches() -> None:
    with pytest.raises(AssertionError):
        check_branches(12, 3)


@given(st.integers(1, 40))
def test_the_sum_is_the_sum(num_parts: int) -> None:
    parts = [torch.arange(5.0) + at for at in range(num_parts)]
    expected = num_parts * torch.arange(5.0) + num_parts * (num_parts - 1) / 2
    assert torch.equal(add_in_tree(parts), expected)


def test_the_order_is_that_of_a_tree_and_no_other() -> None:
    big, small = 2.0**24, 1.0
    for parts in ((big, small, small, small), (small, small, big, small)):  # big + small is big
        assert add_in_tree([torch.tensor(part) for part in parts]).item() == big + 2 * small
    assert sum((torch.tensor(part) for part in (big, small, small, small)), torch.tensor(0.0)).item() == big


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_widened_and_others_are_not(dtype: torch.dtype) -> None:
    assert [part.dtype for part in widened([torch.ones(3, dtype=dtype)] * 2)] == [torch.float32] * 2
    parts = [torch.ones(3, dtype=torch.float64)] * 2
    assert widened(parts) is parts


@given(
    st.integers(0, 5000), st.integers(1, 9), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])
)
def test_slices_are_the_whole_in_whole_cache_lines(numel: int, num_slices: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(numel).to(dtype)
    cut = slices(tensor, num_slices)
    assert len(cut) == num_slices
    assert torch.equal(torch.cat(cut), tensor)
    assert all(piece.data_ptr() % 64 == tensor.data_ptr() % 64 for piece in cut if piece.numel())
    assert len({piece.numel() for piece in cut if piece.numel()}) <= 2
