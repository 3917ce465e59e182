"""Which reductions MPI computes, in which of its types, and which are ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from renkei.communicators.computable import check_defined
from renkei.communicators.reduction import Reduction

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
    check_defined(dtype, reduction)
    if dtype not in _TYPES:
        return Way(None, None, max(1, min(_SLICED, chunk) // 2))
    of_truths = _OF_TRUTHS.get(reduction) if dtype == torch.bool else None
    operation = getattr(mpi, of_truths or _OPERATIONS[reduction])
    return Way(getattr(mpi, _TYPES[dtype]), operation, max(1, chunk // dtype.itemsize))
