"""Who takes part in a round of a training whose members come and go. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

STAY, LEAVE = "stay", "leave"  # what members say when they come to a round


@dataclass(frozen=True)
class Attendance:
    """Who takes part. Members are told by their numbers, which count those that have come, and are never used again.

    Attributes:
        round: its number.
        members: by rank; those that have the training's state are first.
        holders: those that have it; nobody in the beginning.
        leaving: members that won't come to the next round.
        num_come: how many had come when this was decided.
        unheard: those of them that had taken a number and said nothing yet.
        refused: those that were not let in, for what they would train is something else.
    """

    round: int
    members: Sequence[int]
    holders: Sequence[int]
    leaving: Sequence[int]
    num_come: int
    unheard: Sequence[int]
    refused: Sequence[int]

    @property
    def staying(self) -> list[int]:
        """The members that come to the next round, too."""
        return [member for member in self.members if member not in self.leaving]

    def waiting(self, num_come: int) -> list[int]:
        """Those that may want to be let in, so many having come by now."""
        return [*self.unheard, *range(self.num_come, num_come)]

    def after(self, votes: Mapping[int, str], num_come: int, fits: Mapping[int, bool]) -> Attendance:
        """Who takes part in the next round. If nobody is left that has the training's state, there are no members.

        Args:
            votes: what those members say that have come in time.
            num_come: how many have come.
            fits: of those `waiting` that have said what they would train, whether it is this.
        """
        holders = [member for member in self.holders if member in votes]
        others = [member for member in votes if member not in holders]
        newcomers = [member for member, is_this in fits.items() if is_this]
        is_lost = bool(self.holders) and not holders
        return Attendance(
            round=self.round + 1,
            members=[] if is_lost else [*holders, *others, *newcomers],
            holders=holders,
            leaving=[member for member, vote in votes.items() if vote == LEAVE],
            num_come=num_come,
            unheard=[member for member in self.waiting(num_come) if member not in fits],
            refused=[member for member, is_this in fits.items() if not is_this],
        )

    def agreed(self) -> Attendance:
        """The same, once all members have got through the round: those who stay have the training's state."""
        return replace(self, holders=self.staying)


def before_all(num_founders: int) -> Attendance:
    """What the first round follows on, in which those take part that begin."""
    return Attendance(-1, [], [], [], num_founders, [], [])
