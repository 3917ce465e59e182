"""Which wire format, and whether double buffering, hides the exchange of gradients: arithmetic only.

A step takes what it computes, and what of the exchange computing doesn't hide. An exchange is hidden by the backward
pass, or by a whole step where gradients are late; but not what the processor itself does for it, if it is the one that
computes. Of the ways whose step is nearly the shortest, the one is chosen that changes training least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from renkei.communicators.exchange_times import ExchangeTimes

BACKWARD = 2 / 3  # of a step's computing: two products of matrices for each of the forward pass
NEARLY = 1.1  # times the shortest step


@dataclass(frozen=True)
class Way:
    """How gradients come to other ranks.

    Attributes:
        wire: the name of a wire format.
        is_late: with double buffering.
    """

    wire: str
    is_late: bool = False

    def __str__(self) -> str:
        return self.wire + " with double buffering" * self.is_late


# PowerSGD is none of them: what it does to a training depends on the model.
WIRES = ("fp32", "bf16", "int8")
# From what changes training least to what changes it most: a step's delay does more than rounding, even to 8 bits.
WAYS = (Way("fp32"), Way("bf16"), Way("int8"), Way("bf16", is_late=True), Way("int8", is_late=True))


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    way: Way
    why: str


@dataclass(frozen=True)
class Measured:
    """What steps have taken, gradients going in fp32, with nobody knowing better.

    Attributes:
        computing: seconds a step of the slowest rank, but for what it waited for gradients.
        waiting: seconds a step that it waited for them.
        number: of fp32 gradients.
    """

    computing: float
    waiting: float
    number: int


def ways_for(is_late: bool | None, *, may_be_late: bool = True) -> tuple[Way, ...]:
    """Those to choose from: the first is the way in which steps were measured.

    Args:
        is_late: whether with double buffering; None where that is to be chosen, too.
        may_be_late: whether the training is one that can go with it.
    """
    if is_late is not None:
        return tuple(Way(wire, is_late) for wire in WIRES)
    return tuple(way for way in WAYS if may_be_late or not way.is_late)


def choose(ways: Sequence[Way], measured: Measured, times: ExchangeTimes) -> Choice:
    """The first of the ways whose step is at most `NEARLY` times as long as the shortest.

    What the first leaves of an exchange to be waited for was measured in training; for the others it is predicted.
    """
    first, *others = ways
    working = min(times.processor_seconds(first.wire, measured.number), measured.computing)
    computing = measured.computing - working
    exposed = {first: measured.waiting + working}
    exposed |= {way: predict_exposed(way, computing, measured.number, times) for way in others}
    shortest = computing + min(exposed.values())
    chosen = next(way for way in ways if computing + exposed[way] <= NEARLY * shortest)
    return Choice(chosen, _explain(chosen, computing, exposed, measured.number, times))


def predict_exposed(way: Way, computing: float, number: int, times: ExchangeTimes) -> float:
    """Seconds by which an exchange of so many gradients makes a step longer that computes for so long."""
    working = times.processor_seconds(way.wire, number)
    hidden = computing * (1.0 if way.is_late else BACKWARD)
    return working + max(0.0, times.seconds(way.wire, number) - working - hidden)


def _explain(chosen: Way, computing: float, exposed: dict[Way, float], number: int, times: ExchangeTimes) -> str:
    first, *others = (f"{_ms(seconds)} ms in {way}" for way, seconds in exposed.items())
    alone = ", ".join(f"{_ms(times.seconds(wire, number))} ms in {wire}" for wire in WIRES)
    return (
        f"a step computes for {_ms(computing)} ms, and the exchange of {number:,} gradients, which alone takes "
        f"{alone}, adds {first}, and by prediction {', '.join(others)}; of the ways at most {NEARLY - 1:.0%} slower "
        f"than the quickest, {chosen} changes training least"
    )


def _ms(seconds: float) -> str:
    """Milliseconds, two digits where they are few."""
    return f"{1000 * seconds:.0f}" if seconds >= 0.00995 else f"{1000 * seconds:.2g}"
