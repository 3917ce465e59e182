"""What a reducer remembers of the step it is in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Step:
    """What has happened since `zero_grad`.

    Attributes:
        num_exchanges: exchanges begun.
        is_exchanged: whether ``.grad`` holds the mean.
        is_owing: whether there is something that no exchange has been begun for.
        weight: what the losses' weights add up to; None without any.
        is_plain: whether there was a loss without a weight.
        stray: name of a parameter that got a gradient which can't be exchanged any more.
        backwards: the backward passes whose end will be noticed.
        is_outer_running: whether one of them is the outermost.
    """

    num_exchanges: int = 0
    is_exchanged: bool = False
    is_owing: bool = False
    weight: float | None = None
    is_plain: bool = False
    stray: str | None = None
    backwards: set[int] = field(default_factory=set)
    is_outer_running: bool = False
