"""What is computed of which numbers, and what torch has to be shown instead of some of them. Arithmetic only."""

from __future__ import annotations

import torch
from torch import Tensor

from renkei.communicators.reduction import Reduction
from renkei.errors import UsageError

# Of which torch moves numbers, but adds none; their sums are the same bits as those of signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_COMPUTED = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128,
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, *_SIGNED,
}  # fmt: skip


def check_defined(dtype: torch.dtype, reduction: Reduction) -> None:
    """Raise `UsageError` if there is no such reduction of such numbers."""
    if dtype not in _COMPUTED:
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


def as_signed(tensor: Tensor) -> Tensor:
    """The same bits, as signed numbers where torch computes none without sign."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


def swap_order(tensor: Tensor, reduction: Reduction) -> None:
    """Let signed numbers be in the order that their bits have without sign, or back, if that is what is reduced."""
    if tensor.dtype in _SIGNED and reduction in ("min", "max"):
        signed = as_signed(tensor)
        signed.bitwise_xor_(torch.iinfo(signed.dtype).min)
