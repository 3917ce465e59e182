"""Which gradient goes into which bucket, and where: arithmetic only, no tensors.

A bucket is one flat message. Gradients share one so that each message is worth its latency; buckets are filled in the
order gradients become ready, so that the first can leave while the backward pass still computes the rest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

ALIGNMENT = 64  # bytes: a cache line, and what torch gives a tensor of its own


@dataclass(frozen=True)
class GradientSize:
    """What planning needs to know of one gradient.

    Attributes:
        numel: number of elements.
        itemsize: bytes per element.
        kind: device and dtype, for example ``cpu/float32``; gradients share a bucket only within a kind.
        is_exact: whether elements hold the small integers of a `Ballot` exactly when summed (32-bit floats do).
    """

    numel: int
    itemsize: int
    kind: str
    is_exact: bool


@dataclass(frozen=True)
class Slot:
    """The place of one gradient in its bucket, in elements."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One message: gradients of one kind, then `tail` elements for what rides along (see `ballot`).

    Attributes:
        kind: as `GradientSize.kind`.
        slots: where each gradient lies.
        body: elements up to the end of the last gradient, padding included.
        tail: elements after that.
    """

    kind: str
    slots: tuple[Slot, ...]
    body: int
    tail: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole message."""
        return self.body + self.tail

    @property
    def parameters(self) -> list[int]:
        """The parameters whose gradients are in it."""
        return [slot.parameter for slot in self.slots]


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """Bytes at which a bucket is closed.

    Attributes:
        first: the first one. A small one leaves early, which pays where moving bytes doesn't take the time of the
            cores that compute: on GPUs, and between hosts.
        rest: all others.
    """

    first: int = 2**20
    rest: int = 25 * 2**20


def plan_buckets(
    sizes: Sequence[GradientSize], order: Sequence[int], *, tail: int, tail_kind: str, limits: BucketSizes
) -> tuple[Bucket, ...]:
    """Put the gradients, taken in `order`, into buckets; the result is in the order of sending.

    The last bucket carries the tail; if it can't do so exactly, one of kind `tail_kind` with nothing else follows.
    """
    if sorted(order) != list(range(len(sizes))):
        raise ValueError("order must name every gradient exactly once")
    closed: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    for index in order:
        size = sizes[index]
        bucket = _with_slot(filling.get(size.kind, Bucket(size.kind, (), 0)), index, size)
        filling[size.kind] = bucket
        if bucket.body * size.itemsize >= (limits.rest if closed else limits.first):
            closed.append(filling.pop(size.kind))
    is_exact = {size.kind: size.is_exact for size in sizes}
    closed += sorted(filling.values(), key=lambda bucket: is_exact[bucket.kind])  # one that can carry the tail last
    if closed and is_exact[closed[-1].kind]:
        return (*closed[:-1], replace(closed[-1], tail=tail))
    return (*closed, Bucket(tail_kind, (), 0, tail))


def _with_slot(bucket: Bucket, index: int, size: GradientSize) -> Bucket:
    step = max(1, ALIGNMENT // size.itemsize)
    offset = -(-bucket.body // step) * step
    return replace(bucket, slots=(*bucket.slots, Slot(index, offset, size.numel)), body=offset + size.numel)


def fingerprint(plan: Sequence[Bucket]) -> str:
    """A short text that differs when two plans do, for ranks to compare; each rank has a GPU of another number."""
    alike = [replace(bucket, kind=re.sub(r":\d+/", "/", bucket.kind)) for bucket in plan]
    return hashlib.sha256(repr(alike).encode()).hexdigest()[:16]
