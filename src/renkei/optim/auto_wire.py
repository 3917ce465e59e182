"""``wire="auto"``: an optimizer's first steps are timed, and then all ranks choose how gradients go from there on."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from renkei.communicators.communicator import Communicator
from renkei.communicators.exchange_times import ExchangeTimes
from renkei.communicators.factory import tuning_key
from renkei.communicators.tuning import recall
from renkei.errors import UsageError
from renkei.optim.wire_choice import Choice, Measured, Way, choose, ways_for

KEY = "renkei_wire"  # where it is in a state_dict
STEPS = 10  # after which is chosen
_UNTIMED = 2  # in the first steps ranks learn how gradients come, and plan anew


class AutoWire:
    """What one optimizer has measured of its steps, and what was chosen. Creation is a collective operation.

    Args:
        comm: the ranks.
        double_buffering: whether with it; None where that is to be chosen, too.

    Attributes:
        choice: what was chosen; None before that, and on one rank.
        seconds: by step, what this rank computed, and what it waited for gradients.

    Raises:
        UsageError: rank 0 can't read what was saved; or `virtual_ranks` asks for what no measurement may change.
    """

    def __init__(self, comm: Communicator, double_buffering: bool | None) -> None:
        if comm.options.virtual_ranks is not None:
            raise UsageError(
                "wire='auto' goes by what is quickest where it runs, but virtual_ranks asks for the same bits on any "
                "number of ranks; name a wire format"
            )
        self._comm, self._given = comm, double_buffering
        self.choice: Choice | None = None
        self.seconds: list[tuple[float, float]] = []
        self._num_steps = 0
        self._may_be_late = True
        self._last: tuple[float, float] | None = None
        self._num_untimed = _UNTIMED
        self._times = _recall(comm) if comm.num_addends > 1 else None
        if comm.num_addends > 1 and self._times is None:
            why = f"how long exchanges take was not measured for these ranks and {_spec_of(comm)}"
            self.choice = Choice(self.way, why)
            self._say(f"{why}; measure with `renkei bench all-reduce --save`, on ranks started as these were")

    @property
    def way(self) -> Way:
        """How gradients go now."""
        return Way("fp32", bool(self._given)) if self.choice is None else self.choice.way

    @property
    def asked(self) -> tuple[str, bool | None]:
        """The wire and `double_buffering` that a copy is to be made with."""
        return ("auto", self._given) if self.choice is None else (self.way.wire, self.way.is_late)

    @property
    def is_due(self) -> bool:
        """Whether it is time to choose: on all ranks at once."""
        return self._times is not None and self.choice is None and self._num_steps >= STEPS

    def note_step(self, waited: float, *, may_be_late: bool) -> None:
        """A step was made.

        Args:
            waited: seconds that this rank has waited for gradients so far.
            may_be_late: whether it could have been made with the gradients of the step before.
        """
        if self.choice is not None or self._times is None:
            return
        now = time.perf_counter()
        self._may_be_late &= may_be_late
        self._num_steps += 1
        if self._num_untimed:
            self._num_untimed -= 1
        elif self._last is not None:
            began, waited_before = self._last
            waiting = waited - waited_before
            self.seconds.append((now - began - waiting, waiting))
        self._last = now, waited

    def insist(self, is_late: bool) -> None:
        """The user has set `double_buffering`: only the wire is to be chosen, and by steps made so."""
        if self.choice is not None:
            self.choice = replace(self.choice, way=replace(self.choice.way, is_late=is_late))
        elif is_late != self.way.is_late:
            self.seconds, self._num_steps, self._num_untimed = [], 0, _UNTIMED
        self._given = is_late

    def decide(self, number: int) -> Way:
        """Choose by what the slowest rank computes; rank 0 does, and says so. A collective operation.

        Args:
            number: of fp32 gradients.
        """
        assert self._times is not None
        computing, waiting = (statistics.median(each) for each in zip(*self.seconds, strict=True))
        everyone = self._comm.all_gather_object((computing, waiting))
        measured = Measured(
            computing=max(its for its, _ in everyone),
            waiting=min(its for _, its in everyone),  # more than that the others wait for the slowest rank
            number=number,
        )
        ways = ways_for(self._given, may_be_late=self._may_be_late)
        self.choice = self._comm.broadcast_object(choose(ways, measured, self._times))
        self._say(self.choice.why)
        return self.way

    def state(self) -> dict[str, Any]:
        """What was chosen, or what has been measured so far, for `restore`."""
        choice = None if self.choice is None else [self.way.wire, self.way.is_late, self.choice.why]
        steps = {"num_steps": self._num_steps, "may_be_late": self._may_be_late, "seconds": list(self.seconds)}
        return {"choice": choice, **steps}

    def restore(self, state: dict[str, Any] | None) -> Way:
        """Go on from what rank 0 has loaded, if anything. A collective operation."""
        state = self._comm.broadcast_object(state)
        if state is None or (state["choice"] is None and self._times is None):
            return self.way
        self.choice = None
        if state["choice"] is not None:
            wire, is_late, why = state["choice"]
            self.choice = Choice(Way(wire, is_late if self._given is None else self._given), why)
            self._say("as was chosen before what was loaded was saved")
        self._num_steps, self._may_be_late = state["num_steps"], state["may_be_late"]
        self.seconds = [(computing, waiting) for computing, waiting in state["seconds"]]
        self._last, self._num_untimed = None, _UNTIMED
        return self.way

    def _say(self, why: str) -> None:
        if self._comm.rank == 0:
            print(f"renkei: gradients go in {self.way}, by wire=auto: {why}", file=sys.stderr, flush=True)


def _recall(comm: Communicator) -> ExchangeTimes | None:
    """What rank 0 finds measured for such a communicator, on every rank; so is its error."""
    found: ExchangeTimes | None = None
    problem: str | None = None
    if comm.rank == 0:
        try:
            tuning = recall(tuning_key(comm.nodes, comm.device))
            found = tuning.exchanges if tuning is not None and tuning.communicator == _spec_of(comm) else None
        except UsageError as error:
            problem = str(error)
    found, problem = comm.broadcast_object((found, problem))
    if problem is not None:
        raise UsageError(problem)
    return found


def _spec_of(comm: Communicator) -> str:
    return f"{comm.name}/{comm.options.backends}"
