"""Which reductions are MPI's, which ours, and which there are none of."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from renkei.communicators.backends.mpi.arithmetic import find_way
from renkei.communicators.computable import halves
from renkei.communicators.reduction import Reduction
from renkei.errors import UsageError

MPI = mock.Mock(name="mpi4py.MPI")


@pytest.mark.parametrize(
    ("dtype", "reduction", "kind", "operation"),
    [
        (torch.float32, "mean", MPI.FLOAT, MPI.SUM),
        (torch.uint64, "max", MPI.UINT64_T, MPI.MAX),
        (torch.complex128, "product", MPI.C_DOUBLE_COMPLEX, MPI.PROD),
        (torch.bool, "sum", MPI.UINT8_T, MPI.MAX),
        (torch.bool, "product", MPI.UINT8_T, MPI.MIN),
        (torch.bool, "bxor", MPI.UINT8_T, MPI.BXOR),
    ],
)
def test_mpi_computes_what_it_can(dtype: torch.dtype, reduction: Reduction, kind: object, operation: object) -> None:
    way = find_way(MPI, dtype, reduction, chunk=1000)
    assert (way.kind, way.operation, way.numel) == (kind, operation, 1000 // dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex32])
def test_16_bits_are_ours_in_pieces_that_fit_into_memory(dtype: torch.dtype) -> None:
    assert find_way(MPI, dtype, "sum", chunk=2**30).operation is None
    assert find_way(MPI, dtype, "sum", chunk=2**30).numel == 2**24
    assert find_way(MPI, dtype, "sum", chunk=10).numel == 5
    assert find_way(MPI, dtype, "sum", chunk=1).numel == 1


@pytest.mark.parametrize(
    ("dtype", "reduction", "reason"),
    [
        (torch.float8_e5m2, "sum", "convert to float32"),
        (torch.int32, "mean", "convert to a floating dtype"),
        (torch.bool, "mean", "convert to a floating dtype"),
        (torch.bfloat16, "band", "only of whole numbers"),
        (torch.complex64, "min", "complex numbers have no order"),
        (torch.complex32, "product", "convert to complex64"),
    ],
)
def test_what_is_not_defined_is_refused(dtype: torch.dtype, reduction: Reduction, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"{dtype}.*{reason}"):
        find_way(MPI, dtype, reduction, chunk=1000)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_of_16_bits_are_seen_as_their_parts() -> None:
    tensor = torch.complex(torch.ones(3), torch.zeros(3)).to(torch.complex32)
    assert halves(tensor).tolist() == [1, 0, 1, 0, 1, 0]
    assert halves(tensor).data_ptr() == tensor.data_ptr()
    plain = torch.ones(3)
    assert halves(plain) is plain
