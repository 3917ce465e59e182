"""What the wires of one plan remember from step to step, by parameter: plans come and go, it stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from renkei.gradients.buckets import Bucket
from renkei.gradients.compression.tentative import Tentative
from renkei.gradients.compression.wire import Wire

NAMES = ("owed", "factors")


class _Place(NamedTuple):
    """Where in an account a parameter's part is."""

    parameter: int
    begin: int
    numel: int


class _Account(NamedTuple):
    """One of the things that a wire remembers.

    Attributes:
        name: what it is.
        kept: the numbers.
        places: the parameters' parts.
        like: a tensor on the same device.
        size: how many numbers there are.
    """

    name: str
    kept: Tentative
    places: list[_Place]
    like: Tensor
    size: int

    def owe(self, place: _Place, more: Tensor) -> None:
        """Add to what counts of a parameter's part."""
        if self.kept.settled is None:
            self.kept.settled = self.like.new_zeros(self.size)
        self.kept.settled[place.begin : place.begin + place.numel].add_(more)


class Feedback:
    """The account of what was lost on the way (error feedback), and where power iterations go on.

    Args:
        plan: the buckets.
        wires: for each bucket, what carries it.
        buffers: for each bucket, a tensor of its length and on its device.
    """

    def __init__(self, plan: Sequence[Bucket], wires: Sequence[Wire], buffers: Sequence[Tensor]) -> None:
        self._debts: list[_Account] = []
        self._factors: list[_Account] = []
        self._loss_scale: float | None = None
        for bucket, wire, buffer in zip(plan, wires, buffers, strict=True):
            if wire.owed is not None:
                places = [_Place(slot.parameter, slot.offset, slot.numel) for slot in bucket.slots]
                self._debts.append(_Account("owed", wire.owed, places, buffer, buffer.numel()))
            if wire.factors is not None:
                begins = accumulate(wire.factor_sizes, initial=0)
                places = [_Place(*each) for each in zip(bucket.parameters, begins, wire.factor_sizes, strict=False)]
                self._factors.append(_Account("factors", wire.factors, places, buffer, sum(wire.factor_sizes)))

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to remember."""
        return bool(self._debts or self._factors)

    @property
    def _accounts(self) -> list[_Account]:
        return self._debts + self._factors

    def settle(self) -> None:
        """The step was made: what was lost in it is owed from now on."""
        for account in self._accounts:
            account.kept.settle()

    def forget(self) -> None:
        """The step was skipped: what was owed before it still is."""
        for account in self._accounts:
            account.kept.forget()

    def reweigh(self, factor: float) -> None:
        """The sums of the last exchange were multiplied by a factor: what was owed before it, and was in them, too."""
        for debt in self._debts:
            debt.kept.reweigh(factor)

    def follow(self, loss_scale: float) -> None:
        """The gradients that come now are of a loss multiplied by that: what is owed of earlier ones has to be, too."""
        if self._loss_scale not in (None, loss_scale):
            for debt in self._debts:
                debt.kept.scale(loss_scale / self._loss_scale)
        self._loss_scale = loss_scale

    def undo(self) -> None:
        """The last exchange was for nothing."""
        for account in self._accounts:
            account.kept.undo()

    def leave(self, parameter: int) -> None:
        """In the last exchange no rank had a gradient of this parameter, so nothing is made of what was owed of it."""
        for debt in self._debts:
            for place in debt.places:
                if place.parameter == parameter:
                    debt.kept.leave(place.begin, place.begin + place.numel)

    def absorb(self, other: Feedback) -> None:
        """Owe what another account of the same parameters owes, too, which owes nothing then."""
        factor = (self._loss_scale or 1.0) / (other._loss_scale or 1.0)
        for parameter, owed in other.state()["owed"]["settled"].items():
            for debt in self._debts:
                for place in debt.places:
                    if place.parameter == parameter:
                        debt.owe(place, owed * factor)
        for debt in other._debts:
            debt.kept.settled = None

    def clear(self) -> None:
        """Remember nothing."""
        for account in self._accounts:
            account.kept.restore({})
        self._loss_scale = None

    def state(self) -> dict[str, Any]:
        """What is remembered, for `restore`: by name, by when it counts, by parameter. Copies."""
        found: dict[str, Any] = {"loss_scale": self._loss_scale}
        for name in NAMES:
            found[name] = {"settled": {}, "pending": {}}
        for account in self._accounts:
            for when, whole in account.kept.state().items():
                for parameter, begin, numel in account.places:
                    found[account.name][when][parameter] = whole[begin : begin + numel].clone()
        return found

    def restore(self, state: Mapping[str, Any], numbers: Mapping[int, int]) -> None:
        """Remember what `state` told, be it under another plan, or of other parameters, and nothing else.

        Args:
            numbers: by parameter then, its number now, of those that are still there; the others' is forgotten.
        """
        self._loss_scale = state["loss_scale"]
        then = {now: before for before, now in numbers.items()}
        for account in self._accounts:
            wholes = {}
            for when, parts in state[account.name].items():
                known = [place for place in account.places if then.get(place.parameter) in parts]
                # of debts each counts for itself; power iterations of a bucket go on together or begin anew together
                if known and (account.name == "owed" or len(known) == len(account.places)):
                    wholes[when] = account.like.new_zeros(account.size)
                    for parameter, begin, numel in known:
                        wholes[when][begin : begin + numel].copy_(parts[then[parameter]])
            account.kept.restore(wholes)
