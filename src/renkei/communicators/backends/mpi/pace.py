"""How often MPI is asked whether it is done: at full speed first, then after naps, and after longer and longer ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

EAGER = 0.005  # seconds since something moved in which who waits asks again at once
ALONE = 0.0001  # seconds of those in which a core isn't yielded to others: perhaps to the rank that is waited for
EAGER_BESIDE = 0.001  # the same for the thread that looks after what nobody waits for, beside what computes
NAP = 0.001  # seconds that this thread sleeps between two looks, and between two looks at the time
LONG_NAP = 0.005  # seconds that a nap lasts at most
_MOVED = 40e-6  # seconds of computing; MPI takes longer to answer only if it moves something meanwhile

give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Pace:
    """When MPI is to be asked again: at once as long as something moves and a while longer, then after naps.

    Attributes:
        moved: when something did.
    """

    def __init__(self, eager: float, begin: float) -> None:
        self._eager, self.moved, self._has_napped = eager, begin, False

    def nap_after(self, took: float) -> float:
        """How long to sleep now that asking has taken so many seconds of computing; 0 for not at all."""
        now = time.monotonic()
        if took > _MOVED:
            if not self._has_napped:  # after a nap whatever is done takes longer: ask once more
                self.moved = now
            self._has_napped = False
            return 0.0
        self._has_napped = now - self.moved > self._eager
        return min(LONG_NAP, (now - self.moved) / 100) if self._has_napped else 0.0
