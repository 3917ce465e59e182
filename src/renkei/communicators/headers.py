"""What ranks tell one another before they exchange tensors, so that a mistake is an error and not a crash or a hang.

Gloo ends the process when message sizes differ, and NCCL waits for ever. So every collective a user calls is preceded
by 32 bytes from each rank, and all ranks see the same headers and come to the same verdict.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
_DEVICES = ["cpu", "cuda"]
_NONE = 255
_OPERATIONS = [
    "all_reduce", "reduce_scatter", "broadcast", "broadcast_into", "all_gather", "gather", "scatter", "all_to_all",
    "broadcast_object", "all_gather_object", "gather_object", "scatter_object",
]  # fmt: skip
REDUCTIONS = ["sum", "mean", "product", "max", "min"]


@dataclass(frozen=True)
class Header:
    """One rank's announcement of a collective.

    Attributes:
        operation: its name.
        number: how many collectives this rank has called on the communicator, this one included.
        reduction: what is computed, for those that compute.
        dtype: of the first tensor this rank brings; None if it brings none.
        device: the type of device that tensor is on.
        numel, ndim: how many elements all of them have together, and the largest number of dimensions.
        tensors_hash: of their shapes, dtypes and types of device.
        root: the rank that sends or receives, for those that have one.
        refused: the rank's arguments are wrong in themselves: nothing will follow.
    """

    operation: str
    number: int
    reduction: str = "sum"
    dtype: torch.dtype | None = None
    device: str | None = None
    numel: int = 0
    ndim: int = 0
    tensors_hash: int = 0
    root: int = 0
    refused: bool = False

    layout: ClassVar[struct.Struct] = struct.Struct("<BBBBBB2xIIQQ")

    @classmethod
    def of(
        cls,
        operation: str,
        number: int,
        tensors: Sequence[Tensor] | None,
        *,
        root: int = 0,
        reduction: str = "sum",
    ) -> Header:
        """The header for a call with `tensors`."""
        if not tensors:
            return cls(operation, number, reduction, root=root)
        digest = hashlib.blake2b(_list(tensors).encode(), digest_size=8).digest()
        return cls(
            operation=operation,
            number=number,
            reduction=reduction,
            dtype=tensors[0].dtype,
            device=tensors[0].device.type,
            numel=sum(tensor.numel() for tensor in tensors),
            ndim=max(tensor.dim() for tensor in tensors),
            tensors_hash=int.from_bytes(digest, "little"),
            root=root,
        )

    def pack(self) -> bytes:
        """The 32 bytes."""
        return self.layout.pack(
            _OPERATIONS.index(self.operation),
            REDUCTIONS.index(self.reduction),
            _NONE if self.dtype is None else DTYPES.index(self.dtype),
            _NONE if self.device is None else _DEVICES.index(self.device),
            self.ndim,
            self.refused,
            self.number % 2**32,
            self.root,
            self.numel,
            self.tensors_hash,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """The header these bytes were packed from."""
        operation, reduction, dtype, device, ndim, refused, number, root, numel, tensors_hash = cls.layout.unpack(data)
        return cls(
            operation=_OPERATIONS[operation],
            number=number,
            reduction=REDUCTIONS[reduction],
            dtype=None if dtype == _NONE else DTYPES[dtype],
            device=None if device == _NONE else _DEVICES[device],
            numel=numel,
            ndim=ndim,
            tensors_hash=tensors_hash,
            root=root,
            refused=bool(refused),
        )

    def describe(self, tensors: Sequence[Tensor] | None) -> str:
        """This call, of these tensors, in words."""
        computes = f" ({self.reduction})" if self.operation in ("all_reduce", "reduce_scatter") else ""
        brings = f" of {_list(tensors)}" if tensors else ""
        return f"{self.operation}{computes} [root {self.root}, call number {self.number}]{brings}"


def problem_with(tensors: Sequence[object] | None) -> str | None:
    """Why these can't be sent, if they can't."""
    for tensor in tensors or ():
        if not isinstance(tensor, Tensor):
            return f"needs tensors, but got {type(tensor).__name__}"
        if tensor.layout != torch.strided:
            return f"needs dense tensors, but got one with layout {tensor.layout}; call its to_dense() first"
        if tensor.dtype not in DTYPES:
            return f"{tensor.dtype} can't be sent; view it as torch.uint8"
        if tensor.device.type not in _DEVICES:
            return f"needs tensors on {' or '.join(_DEVICES)}, but got one on {tensor.device}; move it with .to()"
    return None


def first_misfit(headers: Sequence[Header], *, same_tensors: bool, same_dtype: bool) -> int | None:
    """The first rank whose header doesn't belong with rank 0's; None if all do."""

    def key(header: Header) -> tuple[object, ...]:
        tensors = (header.tensors_hash, header.numel, header.ndim) if same_tensors else ()
        elements = (header.dtype, header.device) if same_dtype else ()
        return (header.operation, header.number, header.reduction, header.root, *elements, *tensors)

    return next((rank for rank, header in enumerate(headers) if key(header) != key(headers[0])), None)


def _list(tensors: Sequence[Tensor]) -> str:
    def describe(tensor: Tensor) -> str:
        place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{place}"

    return ", ".join(map(describe, tensors))
