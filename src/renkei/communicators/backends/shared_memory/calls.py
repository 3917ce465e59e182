"""What ranks say when they meet: what each calls, so that a mistake is one error on all of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from renkei.communicators.backends.shared_memory.memory import Place
from renkei.errors import MismatchError

NOTE_SIZE = 128  # bytes: two cache lines
_LAYOUT = struct.Struct("<16s8s16sqqqq")


class Call(NamedTuple):
    """What one rank calls; it must be the same on all.

    Attributes:
        operation, reduction, dtype: by name.
        num_bytes: of its tensor.
        root: the rank that sends or receives, or another number that belongs to the operation.
    """

    operation: str
    reduction: str = ""
    dtype: str = ""
    num_bytes: int = 0
    root: int = 0

    def __str__(self) -> str:
        details = [self.reduction, self.dtype, f"{self.num_bytes} bytes", f"root {self.root}" if self.root else ""]
        return f"{self.operation} ({', '.join(filter(None, details))})"


class Note(NamedTuple):
    """A call, and where this rank's tensor lies."""

    call: Call
    place: Place

    def pack(self) -> bytes:
        """As bytes that are compared."""
        operation, reduction, dtype, num_bytes, root = self.call
        texts = (operation.encode(), reduction.encode(), dtype.encode())
        return _LAYOUT.pack(*texts, num_bytes, root, *self.place).ljust(NOTE_SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Note:
        """The note these bytes were packed from."""
        operation, reduction, dtype, num_bytes, root, *place = _LAYOUT.unpack(data[: _LAYOUT.size])
        operation, reduction, dtype = (text.rstrip(b"\0").decode() for text in (operation, reduction, dtype))
        return cls(Call(operation, reduction, dtype, num_bytes, root), Place(*place))


def check_same_call(notes: Sequence[Note]) -> None:
    """Raise `MismatchError` if ranks call different things; that their tensors lie elsewhere is fine."""
    for other, note in enumerate(notes):
        if note.call != notes[0].call:
            raise MismatchError(
                f"rank 0 calls {notes[0].call}; rank {other} calls {note.call}; all ranks must call the same "
                "collectives in the same order, with tensors that fit"
            )
