"""Wire formats as a user names them: "bf16", "fp16", "int8", "power_sgd", or a class with other settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from renkei.errors import UsageError
from renkei.gradients.compression.int8 import Int8Codec
from renkei.gradients.compression.names import WIRES
from renkei.gradients.compression.power_sgd import PowerSgdWire
from renkei.gradients.compression.sixteen_bits import Bf16Codec, Fp16Codec
from renkei.gradients.compression.wire import CodedWire, ExactWire, Wire
from renkei.names import check_known


class WireFormat(ABC):
    """How 32-bit gradients travel; others travel as they are.

    Attributes:
        is_exact: whether nothing is lost.
    """

    is_exact: ClassVar[bool] = False

    @abstractmethod
    def make_wire(self, shapes: Sequence[torch.Size]) -> Wire:
        """A wire for one bucket of fp32 gradients of such shapes."""

    def wire_for(self, dtype: torch.dtype, shapes: Sequence[torch.Size]) -> Wire:
        """A wire for one bucket."""
        return self.make_wire(shapes) if dtype == torch.float32 and shapes else ExactWire()


@final
@dataclass(frozen=True)
class Fp32(WireFormat):
    """As they are."""

    is_exact = True

    def make_wire(self, shapes: Sequence[torch.Size]) -> Wire:
        """See `WireFormat`."""
        return ExactWire()


@final
@dataclass(frozen=True, kw_only=True)
class Bf16(WireFormat):
    """Half the bytes: 8 bits of precision, rounded twice however many ranks there are.

    Args:
        error_feedback: whether what is lost is given along with the next gradient. Rounding to the nearest is hardly
            biased, so that this takes memory for little.
    """

    error_feedback: bool = False

    def make_wire(self, shapes: Sequence[torch.Size]) -> Wire:
        """See `WireFormat`."""
        return CodedWire(Bf16Codec(), error_feedback=self.error_feedback)


@final
@dataclass(frozen=True, kw_only=True)
class Fp16(WireFormat):
    """Half the bytes: 11 bits of precision, scaled by block so that nothing overflows.

    Args:
        block: how many values share a scale.
        error_feedback: see `Bf16`.
    """

    block: int = 4096
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check_at_least_one("block", self.block)

    def make_wire(self, shapes: Sequence[torch.Size]) -> Wire:
        """See `WireFormat`."""
        return CodedWire(Fp16Codec(self.block), error_feedback=self.error_feedback)


@final
@dataclass(frozen=True, kw_only=True)
class Int8(WireFormat):
    """A quarter of the bytes: 255 values, scaled by block.

    Args:
        block: how many values share a scale, which takes 4 bytes.
        error_feedback: whether what is lost is given along with the next gradient.
    """

    block: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        _check_at_least_one("block", self.block)

    def make_wire(self, shapes: Sequence[torch.Size]) -> Wire:
        """See `WireFormat`."""
        return CodedWire(Int8Codec(self.block), error_feedback=self.error_feedback)


@final
@dataclass(frozen=True, kw_only=True)
class PowerSgd(WireFormat):
    """Factors of a matrix of low rank in place of each matrix that has many more elements than they have.

    T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD: practical low-rank gradient compression for distributed
    optimization (2019), with error feedback and a warm start.

    Args:
        rank: of the matrices.
        seed: of the first factors, the same on every rank.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        _check_at_least_one("rank", self.rank)

    def make_wire(self, shapes: Sequence[torch.Size]) -> Wire:
        """See `WireFormat`."""
        return PowerSgdWire(shapes, rank=self.rank, seed=self.seed)


FORMATS: dict[str, type[WireFormat]] = dict(zip(WIRES, (Fp32, Bf16, Fp16, Int8, PowerSgd), strict=True))


def read_format(wire: str | WireFormat) -> WireFormat:
    """The format of a name, or what is one already.

    Raises:
        UsageError: there is no such format.
    """
    if isinstance(wire, WireFormat):
        return wire
    if not isinstance(wire, str):
        raise UsageError(f"wire is a {type(wire).__name__}, but must be one of {', '.join(FORMATS)}, or such an object")
    check_known("wire", wire, FORMATS)
    return FORMATS[wire]()


def _check_at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} is {value!r}, but must be a whole number, at least 1")
