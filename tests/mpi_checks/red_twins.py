"""Defects put in on all ranks, which the checks must see."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mpi_checks import movement, reductions
from mpi_checks.common import default_group, in_chunks, size
from renkei.communicators import reduction, summation


def check_red_twin_16_bits_added_in_16() -> None:
    if size() > 2:
        with mock.patch.object(reduction, "widened", lambda parts: parts), pytest.raises(AssertionError):
            reductions.check_16_bits_are_added_in_32()


def check_red_twin_one_addend_left_out() -> None:
    def adds_one_less(parts: Any, combine: Any = torch.add) -> Tensor:
        return summation.add_in_tree(parts[:-1], combine)

    with mock.patch.object(reduction, "add_in_tree", adds_one_less), pytest.raises(AssertionError):
        reductions.check_every_reduction_of_every_dtype()


def check_red_twin_nothing_is_counted() -> None:
    """As if what the counters tell of were done elsewhere."""
    group, deaf = default_group(), mock.MagicMock()
    deaf.copy.return_value = deaf.__sub__.return_value = {}
    with mock.patch.object(group, "bytes_moved", deaf), pytest.raises(AssertionError):
        movement.check_every_dtype_moves()


def check_red_twin_sum_instead_of_mean() -> None:
    transport = default_group().transport
    with mock.patch.object(transport, "_average"), pytest.raises(AssertionError):
        reductions.check_every_reduction_of_every_dtype()


def check_red_twin_the_rest_of_a_message_is_lost() -> None:
    memory: Any = default_group().transport._memory
    whole = memory._make_type

    def without_rest(num_bytes: int) -> Any:
        return whole(num_bytes // memory.chunk * memory.chunk)

    with in_chunks(24), mock.patch.object(memory, "_make_type", without_rest), pytest.raises(AssertionError):
        movement.check_every_dtype_moves()
