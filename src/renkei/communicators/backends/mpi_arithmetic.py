"""Which reductions MPI computes, in which of its types, and which are ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from renkei.communicators.reduction import Reduction
from renkei.communicators.summation import ADDED_IN_32_BITS
from renkei.errors import UsageError

_TYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE",
    torch.int8: "INT8_T", torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T",
    torch.uint8: "UINT8_T", torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T",
    torch.complex64: "C_FLOAT_COMPLEX", torch.complex128: "C_DOUBLE_COMPLEX", torch.bool: "UINT8_T",
}  # fmt: skip
_OPERATIONS: dict[Reduction, str] = {
    "sum": "SUM", "mean": "SUM", "product": "PROD", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR",
    "bxor": "BXOR",
}  # fmt: skip
_OF_TRUTHS: dict[Reduction, str] = {"sum": "MAX", "product": "MIN"}  # or and and, of bytes that are 0 or 1
_SLICED = 2**25  # bytes of 16-bit floats that are added at a time, which takes three times as much memory meanwhile


class Way(NamedTuple):
    """How a reduction of numbers of one dtype is computed.

    Attributes:
        kind, operation: MPI's; None if MPI can't, or would round to 16 bits at every step.
        numel: how many are reduced at a time.
    """

    kind: Any
    operation: Any
    numel: int


def find_way(mpi: Any, dtype: torch.dtype, reduction: Reduction, chunk: int) -> Way:
    """How to reduce such numbers, at most `chunk` bytes at a time.

    Raises:
        UsageError: there is no such reduction of such numbers.
    """
    _check_defined(dtype, reduction)
    if dtype not in _TYPES:
        return Way(None, None, max(1, min(_SLICED, chunk) // 2))
    of_truths = _OF_TRUTHS.get(reduction) if dtype == torch.bool else None
    operation = getattr(mpi, of_truths or _OPERATIONS[reduction])
    return Way(getattr(mpi, _TYPES[dtype]), operation, max(1, chunk // dtype.itemsize))


def _check_defined(dtype: torch.dtype, reduction: Reduction) -> None:
    is_16_bits = dtype in ADDED_IN_32_BITS or dtype == torch.complex32
    if dtype not in _TYPES and not is_16_bits:
        raise UsageError(f"there is no {reduction} of {dtype}; convert to float32 first")
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if reduction == "mean" and is_whole:
        raise UsageError(f"the mean of {dtype} isn't one of {dtype}; convert to a floating dtype first")
    if reduction in ("band", "bor", "bxor") and not is_whole:
        raise UsageError(f"there is no {reduction} of {dtype}, only of whole numbers and truth values")
    if reduction in ("min", "max") and dtype.is_complex:
        raise UsageError(f"there is no {reduction} of {dtype}: complex numbers have no order")
    if reduction == "product" and dtype == torch.complex32:
        raise UsageError(f"there is no product of {dtype}; convert to complex64 first")


def halves(tensor: Tensor) -> Tensor:
    """A flat tensor, or, if it has complex numbers of 16-bit floats, a view of those, which are added one by one."""
    return torch.view_as_real(tensor).view(-1) if tensor.dtype == torch.complex32 else tensor
