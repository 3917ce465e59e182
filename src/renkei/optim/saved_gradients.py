"""What a MultiNodeOptimizer saves besides the inner optimizer's state: gradients that are late or owed, by rank."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from renkei.communicators.communicator import Communicator
from renkei.gradients.readiness import Habits
from renkei.gradients.reducer import Reducer

KEY = "renkei"  # where it is in a state_dict


def save(reducer: Reducer, place: list[Any]) -> dict[str, Any]:
    """What a resumed run needs for the same bits.

    Args:
        place: whose it is: it is of use to nobody else.
    """
    habits = None if reducer.habits is None else asdict(reducer.habits)
    return {"place": place, "habits": habits, "turns": reducer.turns.state()}


def check_own(comm: Communicator, saved: dict[str, Any] | None, place: list[Any]) -> dict[str, Any] | None:
    """What was saved, if every rank has saved its own; else None on all, which is said. A collective operation."""
    everyones = comm.all_gather_object(saved is not None and saved["place"] == place)
    if all(everyones):
        return saved
    if comm.rank == 0:
        print(
            f"renkei: gradients that were late or owed are not restored: rank {everyones.index(False)} has loaded no "
            "state of its own; let each rank save and load its optimizer's state_dict()",
            file=sys.stderr,
            flush=True,
        )
    return None


def habits_of(saved: dict[str, Any]) -> Habits | None:
    """How gradients came, if that had been learnt."""
    return None if saved["habits"] is None else Habits(**saved["habits"])
