"""Training apart for a while, then together for a moment: local SGD, post-local SGD, DiLoCo.

    each rank          steps by itself, with its own gradients                                    (inner optimizer)
    at a round's end   the mean of what ranks have moved is a gradient for the parameters they share   (outer optimizer)
    then               all go on from those

The outer optimizer is a `MultiNodeOptimizer`, whose gradients so travel by any communicator, in any wire format, and a
round late if asked for: the exchange then has the whole of the next round's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from renkei.communicators.attendance import Attendance
from renkei.communicators.communicator import Communicator
from renkei.communicators.membership import Members
from renkei.errors import RenkeiError, UsageError
from renkei.gradients.compression.formats import WireFormat, read_format
from renkei.optim.initial_state import check_alike, describe
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.optim.outer import Outer, outer_average
from renkei.optim.structure import parameters_of


class LocalUpdates:
    """Lets the ranks of `comm` train apart with `inner`, and brings together what they have moved after `every` steps.

    Nothing else in a script changes: ``inner.step()`` counts steps, and the one that ends a round is a collective
    operation. Gradients are each rank's own. Before evaluation, and in the end, call `flush`. (A step that a
    ``GradScaler`` skips isn't counted, so that ranks would come to be at different steps: use bf16, which needs none.)

    Ranks begin with rank 0's parameters and buffers, and count equally.

    Args:
        inner: the optimizer that each rank steps with; its state stays with the rank.
        comm: the ranks; or members that may come and go (`renkei.join`): then a member that ends, however it does, ends
            nobody else, and is left out from the end of the round on.
        model: what is trained: has buffers to start from.
        every: steps of a round, or what gives them for the number of steps made so far.
        outer: makes the outer optimizer: `outer_average` or `outer_nesterov()`, or what makes any of torch's.
        wire: how what was moved travels, see `MultiNodeOptimizer`.
        overlap: whether it travels during the next round, at whose end it is used. Each rank goes on from what ranks
            share plus what it has moved itself meanwhile.

    Attributes:
        rounds: that have ended.
        steps: that a rank has made by now which has been there from the beginning.
        has_left: whether the last round of this member is over.
    """

    def __init__(
        self,
        inner: Optimizer,
        comm: Communicator | Members,
        *,
        model: nn.Module | None = None,
        every: int | Callable[[int], int],
        outer: Outer = outer_average,
        wire: str | WireFormat = "fp32",
        overlap: bool = False,
    ) -> None:
        self.inner, self._model = inner, model
        self._every = _round_lengths(every)
        self._wire, self._overlap = read_format(wire), overlap
        self._own = [parameter for parameter in parameters_of(inner) if parameter.requires_grad]
        self._shared = [_wide(parameter) for parameter in self._own]
        self._outer = outer(self._shared)
        self._moved = [torch.zeros_like(shared) for shared in self._shared]  # by this rank, and given to nobody yet
        self._has_moved = False
        self._given: list[Tensor] | None = None  # what is on its way
        self.rounds = self.steps = self._steps_in_round = 0
        self._is_leaving = self.has_left = False
        self._exchanged: MultiNodeOptimizer | None = None
        self._comm: Communicator | None = None
        self._members = comm if isinstance(comm, Members) else None
        if isinstance(comm, Members):
            self._end_round_with(comm, comm.enter(self._description()))
        else:
            check_alike(comm, self._description().splitlines())
            self._connect(comm.duplicate(), is_late=overlap)
            self._adopt(comm.broadcast_object(self._handed_over()))
        self._begin_round()
        self._hook = inner.register_step_post_hook(lambda *_: self._after_step())

    # -- what users call ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """End the round now, on all ranks alike, so that all have the same parameters; before evaluation, say.

        For a member that has left it does nothing.
        """
        if self.has_left:
            return
        self._collect()
        if self._members is not None and (self._has_moved or self._given is not None):
            self._end_round_with(self._members, self._members.meet(is_leaving=self._is_leaving), is_late=False)
        elif self._members is None:
            assert self._exchanged is not None
            if self._has_moved:
                self._exchange(self._exchanged)
                self._commit(self._exchanged)
            self._exchanged.flush()
            self._given = None
        self._begin_round()

    def leave(self) -> None:
        """Take part up to the end of this round, and then no longer (`has_left`); the others go on.

        Only for members that may come and go.
        """
        if self._members is None:
            raise UsageError(
                "leave() is for members that may come and go: give LocalUpdates what renkei.join() returns"
            )
        self._is_leaving = True

    def close(self) -> None:
        """Stop exchanging; parameters and inner optimizer stay as they are."""
        self._hook.remove()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._exchanged is not None:
            self._exchanged.close()
        if self._members is not None:
            self._members.close()

    def state_dict(self) -> dict[str, Any]:
        """What later rounds depend on besides the parameters and the inner optimizer, which differ by rank, too.

        Each rank saves and loads its own, and the model's, and the inner optimizer's.
        """
        assert self._exchanged is not None
        return {
            "shared": [shared.detach().clone() for shared in self._shared],
            "outer": self._exchanged.state_dict(),
            "given": self._given and [given.clone() for given in self._given],
            "counts": [self.rounds, self.steps, self._steps_in_round],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where a rank of the same number was, among as many; a collective operation."""
        assert self._exchanged is not None
        for shared, saved in zip(self._shared, state["shared"], strict=True):
            shared.copy_(saved)
        self._exchanged.load_state_dict(state["outer"])
        self._given = state["given"] and [
            given.to(shared) for given, shared in zip(state["given"], self._shared, strict=True)
        ]
        self.rounds, self.steps, self._steps_in_round = state["counts"]
        self._length = self._every(self.steps - self._steps_in_round)

    # -- a round --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin_round(self) -> None:
        for own, start in zip(self._own, self._start(), strict=True):
            own.copy_(start)
        self._steps_in_round = 0
        self._length = self._every(self.steps)

    def _start(self) -> list[Tensor]:
        """Where a round begins: at what ranks share, less what this one has given that hasn't come back yet."""
        given = self._given or [torch.zeros((), device=shared.device) for shared in self._shared]
        return [
            (shared.detach() - each).to(own.dtype)
            for shared, each, own in zip(self._shared, given, self._own, strict=True)
        ]

    def _after_step(self) -> None:
        if self.has_left:
            return
        self.steps += 1
        self._steps_in_round += 1
        if self._steps_in_round < self._length:
            return
        self._collect()
        if self._members is not None:
            self._end_round_with(self._members, self._members.meet(is_leaving=self._is_leaving))
            if self._is_leaving:
                self.has_left = True
                self._disconnect()  # the hook stays, for torch goes through all hooks just now
        else:
            assert self._exchanged is not None
            self._exchange(self._exchanged)
            self._commit(self._exchanged)
        self._begin_round()

    def _collect(self) -> None:
        """Note what this rank has moved since the round began."""
        for moved, start, own in zip(self._moved, self._start(), self._own, strict=True):
            moved.add_(start - own.detach())
        self._has_moved |= self._steps_in_round > 0

    def _exchange(self, exchanged: MultiNodeOptimizer) -> None:
        """Give what was moved; ``.grad`` of what is shared becomes the mean of that, or of what was given before."""
        exchanged.zero_grad()
        for shared, moved in zip(self._shared, self._moved, strict=True):
            shared.grad = moved if self._has_moved else None
        exchanged.synchronize(weight=float(self._has_moved))

    def _commit(self, exchanged: MultiNodeOptimizer) -> None:
        """Step with that mean."""
        exchanged.step()
        self._given = self._moved if exchanged.double_buffering and self._has_moved else None
        self._moved, self._has_moved = [torch.zeros_like(moved) for moved in self._moved], False
        self.rounds += 1

    # -- whose number changes -------------------------------------------------------------------------------------

    def _end_round_with(self, members: Members, attendance: Attendance, *, is_late: bool | None = None) -> None:
        """Exchange with those that are there, as often as it takes until all of them have got through."""
        while not self._attempt(members, attendance, is_late=self._overlap if is_late is None else is_late):
            attendance = members.meet(is_leaving=self._is_leaving)

    def _attempt(self, members: Members, attendance: Attendance, *, is_late: bool) -> bool:
        well = False
        try:
            self._connect_to(members, attendance, is_late=is_late and not attendance.leaving)
            assert self._exchanged is not None
            if attendance.holders:
                self._exchange(self._exchanged)
            well = True
        except UsageError:
            raise
        except RenkeiError:  # some member has gone, or is late
            pass
        if not members.agree(well=well):
            self._withdraw()
            return False
        assert self._exchanged is not None
        if attendance.holders:
            self._commit(self._exchanged)
        return True

    def _connect_to(self, members: Members, attendance: Attendance, *, is_late: bool) -> None:
        """Be connected to those that take part, who all have what ranks share."""
        comm = members.connect()
        if comm is self._comm and self._exchanged is not None and self._exchanged.double_buffering == is_late:
            return
        self._withdraw()
        self._connect(comm, is_late=is_late)
        handed_over = comm.broadcast_object(self._handed_over())
        if members.number not in attendance.holders:
            self._adopt(handed_over)

    def _withdraw(self) -> None:
        """What is on its way won't be used by anybody: it is to be given again."""
        if self._given is not None:
            for moved, given in zip(self._moved, self._given, strict=True):
                moved.add_(given)
            self._given, self._has_moved = None, True

    # -- beginning alike ------------------------------------------------------------------------------------------

    def _connect(self, comm: Communicator, *, is_late: bool) -> None:
        """Exchange over `comm` from now on; what is shared, and the outer optimizer, become those of its rank 0."""
        before, self._comm = self._exchanged, comm
        self._exchanged = MultiNodeOptimizer(self._outer, comm, wire=self._wire, double_buffering=is_late)
        if before is not None:
            self._exchanged.inherit(before)
            before.close()

    def _description(self) -> str:
        """What must be the same on all ranks."""
        names = [f"parameter {number}" for number in range(len(self._shared))]
        return "\n".join(describe(self._outer, names, self._model))

    def _handed_over(self) -> dict[str, Any]:
        """What those who begin get from others."""
        buffers = [] if self._model is None else [buffer.detach().cpu() for buffer in self._model.buffers()]
        return {"counts": [self.rounds, self.steps], "buffers": buffers}

    @torch.no_grad()
    def _adopt(self, handed_over: dict[str, Any]) -> None:
        self.rounds, self.steps = handed_over["counts"]
        if self._model is not None:
            for buffer, value in zip(self._model.buffers(), handed_over["buffers"], strict=True):
                buffer.copy_(value)


def _wide(parameter: Tensor) -> Parameter:
    """A copy in at least 32 bits, so that what many rounds move a little isn't rounded away."""
    return Parameter(parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True))


def _round_lengths(every: int | Callable[[int], int]) -> Callable[[int], int]:
    if callable(every):
        return every
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every is {every!r}, but must be a whole number of steps, at least 1, or a function of steps")
    return lambda step: every
