"""How one bucket travels: as it is, or coded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from renkei.gradients.compression.codec import Codec
from renkei.gradients.compression.tentative import Tentative

Add = Callable[[Tensor], None]


class Work(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Return when the sum is in the buffer; raise if it can't come."""


class Carrier(Protocol):
    """What is asked of whoever carries the buckets; a communicator is one."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def num_addends(self) -> int:
        """How many ranks' buffers a sum consists of."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of zeros for a bucket."""

    def start_sum(self, buffer: Tensor, pieces: Sequence[Tensor]) -> Work:
        """Begin to replace a flat buffer by its sum over ranks; `pieces` are views of the tensors it consists of."""

    def start_coded_sum(self, buffer: Tensor, codec: Codec, owed: Tensor | None) -> Work:
        """Begin to replace a flat buffer by its sum over ranks, which travels coded, and is the same on all.

        Args:
            owed: fp32, as long as the buffer: is given along, and overwritten by what this rank's coding loses.
        """

    def start_sums(self, run: Callable[[Add], None], device: torch.device) -> Work:
        """Begin what takes several sums, one after the other, beside what the caller does.

        Args:
            run: is given what replaces a flat fp32 buffer on such a device by its sum over ranks.
        """


class Wire(Protocol):
    """Carries one bucket, over and over.

    Attributes:
        owed: fp32, as long as the bucket: what of this rank's gradients has been lost and is still to be given, for
            what keeps an account of it (error feedback).
        factors: what else it remembers, if anything: of each gradient as many numbers as `factor_sizes` says.
    """

    owed: Tentative | None
    factors: Tentative | None
    factor_sizes: Sequence[int]

    def start_sum(self, carrier: Carrier, buffer: Tensor, pieces: Sequence[Tensor]) -> Work:
        """Begin to replace the bucket's buffer by its sum over ranks."""


class ExactWire:
    """The bucket as it is."""

    owed: Tentative | None = None
    factors: Tentative | None = None
    factor_sizes: Sequence[int] = ()

    def start_sum(self, carrier: Carrier, buffer: Tensor, pieces: Sequence[Tensor]) -> Work:
        """Begin."""
        return carrier.start_sum(buffer, pieces)


class CodedWire:
    """The bucket in fewer bytes, with or without error feedback."""

    def __init__(self, codec: Codec, *, error_feedback: bool) -> None:
        self._codec = codec
        self.owed = Tentative() if error_feedback else None
        self.factors: Tentative | None = None
        self.factor_sizes: Sequence[int] = ()
        self._gaps: Tensor | None = None

    def start_sum(self, carrier: Carrier, buffer: Tensor, pieces: Sequence[Tensor]) -> Work:
        """Begin."""
        if self._gaps is None:
            self._gaps = _between(buffer, pieces)
        buffer.index_fill_(0, self._gaps, 0.0)  # a NaN left there by one sum would spoil its block in all that follow
        owed = (
            None if self.owed is None or carrier.num_addends == 1 else self.owed.begin(lambda: torch.zeros_like(buffer))
        )
        return carrier.start_coded_sum(buffer, self._codec, owed)


def _between(buffer: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """The places in a buffer that belong to none of its pieces: gradients begin at whole cache lines."""
    is_free = torch.ones(buffer.shape, dtype=torch.bool, device=buffer.device)
    for piece in pieces:
        begin = piece.storage_offset() - buffer.storage_offset()
        is_free[begin : begin + piece.numel()] = False
    return is_free.nonzero().view(-1)


def give_along(owed: Tensor | None, buffer: Tensor) -> None:
    """Add what is owed to what is given; nothing is owed then."""
    if owed is not None:
        buffer.add_(owed)
        owed.zero_()
