"""How long the ranks of a topology take to exchange gradients in each wire format: what was measured, and a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeTimes:
    """Times of two exchanges in each wire format, on the slowest rank, with nothing else to do.

    Attributes:
        numbers: of fp32 gradients that were exchanged: few, and many.
        milliseconds: by wire format, how long each took.
        processor_milliseconds: by wire format, for how long of that a rank's processor worked (coding, adding,
            copying), which it can't do while it computes; 0 where a GPU computes.

    Raises:
        ValueError: there aren't two of each.
    """

    numbers: Sequence[int]
    milliseconds: Mapping[str, Sequence[float]]
    processor_milliseconds: Mapping[str, Sequence[float]]

    def __post_init__(self) -> None:
        rows = [self.numbers, *self.milliseconds.values(), *self.processor_milliseconds.values()]
        if any(len(row) != 2 for row in rows) or self.milliseconds.keys() != self.processor_milliseconds.keys():
            raise ValueError("exchange times are not two of each wire format")

    def seconds(self, wire: str, number: int) -> float:
        """How long the exchange of so many gradients takes: alpha + beta x number, as in Hockney's model."""
        return self._on_the_line(self.milliseconds[wire], number)

    def processor_seconds(self, wire: str, number: int) -> float:
        """For how long of that a rank's processor works."""
        return self._on_the_line(self.processor_milliseconds[wire], number)

    def _on_the_line(self, milliseconds: Sequence[float], number: int) -> float:
        few, many = self.numbers
        beta = max(0.0, (milliseconds[1] - milliseconds[0]) / (many - few))
        alpha = max(0.0, milliseconds[0] - beta * few)
        return (alpha + beta * number) / 1000
