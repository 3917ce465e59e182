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

from renkei.errors import MismatchError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
_NO_DTYPE = 255
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
        dtype, numel, ndim, shape_hash: of the tensors this rank brings, taken together; None and zeros if none.
        root: the rank that sends or receives, for those that have one.
        refused: the rank's arguments are wrong in themselves: nothing will follow.
    """

    operation: str
    number: int
    reduction: str = "sum"
    dtype: torch.dtype | None = None
    numel: int = 0
    ndim: int = 0
    shape_hash: int = 0
    root: int = 0
    refused: bool = False

    layout: ClassVar[struct.Struct] = struct.Struct("<BBBBIQQII")

    @classmethod
    def of(
        cls,
        operation: str,
        number: int,
        tensors: Sequence[torch.Tensor] | None,
        *,
        root: int = 0,
        reduction: str = "sum",
    ) -> Header:
        """The header for a call with `tensors`, which share a dtype; `ndim` is the largest of theirs."""
        if not tensors:
            return cls(operation, number, reduction, root=root)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8).digest()
        return cls(
            operation=operation,
            number=number,
            reduction=reduction,
            dtype=tensors[0].dtype,
            numel=sum(tensor.numel() for tensor in tensors),
            ndim=max(len(shape) for shape in shapes),
            shape_hash=int.from_bytes(digest, "little"),
            root=root,
        )

    def pack(self) -> bytes:
        """The 32 bytes."""
        return self.layout.pack(
            _OPERATIONS.index(self.operation),
            REDUCTIONS.index(self.reduction),
            _NO_DTYPE if self.dtype is None else DTYPES.index(self.dtype),
            self.ndim,
            self.number % 2**32,
            self.numel,
            self.shape_hash,
            self.root,
            self.refused,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """The header these bytes were packed from."""
        operation, reduction, dtype, ndim, number, numel, shape_hash, root, refused = cls.layout.unpack(data)
        return cls(
            operation=_OPERATIONS[operation],
            number=number,
            reduction=REDUCTIONS[reduction],
            dtype=None if dtype == _NO_DTYPE else DTYPES[dtype],
            numel=numel,
            ndim=ndim,
            shape_hash=shape_hash,
            root=root,
            refused=bool(refused),
        )

    def __str__(self) -> str:
        parts = [self.operation]
        if self.operation in ("all_reduce", "reduce_scatter"):
            parts.append(f"({self.reduction})")
        if self.dtype is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            parts.append(f"of {self.numel} {dtype} in {self.ndim} dimension{'s' * (self.ndim != 1)}")
        return f"{' '.join(parts)} [root {self.root}, call number {self.number}]"


def check(headers: Sequence[Header], *, same_shape: bool, same_dtype: bool) -> None:
    """Raise `MismatchError`, on every rank with the same text, unless the ranks' headers belong together."""

    def key(header: Header) -> tuple[object, ...]:
        shape = (header.shape_hash, header.numel, header.ndim) if same_shape else ()
        dtype = (header.dtype,) if same_dtype else ()
        return (header.operation, header.number, header.reduction, header.root, *dtype, *shape)

    for rank, header in enumerate(headers):
        if key(header) != key(headers[0]):
            raise MismatchError(
                f"rank 0 calls {headers[0]}; rank {rank} calls {header}; all ranks must call the same collectives in "
                "the same order, with tensors that fit"
            )
