"""Members of a training that come and go: at the end of each round it is decided, over a store, who takes part.

    tickets                 how many have come; each takes the next number
    hello/NUMBER            what one of them says of itself
    attendance/N/decision   who takes part in round N: see `Attendance`
    agreement/N/decision    whether all of them got through it, so that it counts
    invited/NUMBER          the first round of one that came later, or why it is refused

Each decision follows from the one before, and none is ever taken back, so that all know the same at any time.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from renkei.communicators.attendance import LEAVE, STAY, Attendance, before_all
from renkei.communicators.channel import translate
from renkei.communicators.choice import choose
from renkei.communicators.communicator import Communicator
from renkei.communicators.decision import decide
from renkei.communicators.factory import COMMUNICATORS
from renkei.communicators.groups import choose_device
from renkei.communicators.job import address_towards
from renkei.communicators.network import connect_anew
from renkei.communicators.options import Options
from renkei.communicators.requested import read_name
from renkei.errors import LaunchError, PeerLostError, UsageError
from renkei.launch.rendezvous import is_loopback

_LOOK_EVERY = 1.0  # seconds, at most, between looks whether one is let in

T = TypeVar("T")


def join(
    store: dist.Store,
    *,
    founders: int,
    deadline: float = 60.0,
    patience: float = 300.0,
    communicator: str = "flat/gloo",
    device: str | torch.device | None = None,
) -> Members:
    """Become a member of a training that others may leave and join, at the end of each of its rounds.

    To be given to `renkei.LocalUpdates`. The process needs no launcher; whoever can reach the store can take part.

    Args:
        store: of `torch.distributed`, the same for all members: a ``TCPStore``, whose host must outlive the training.
        founders: how many members the training begins with: the first that come. The same for all.
        deadline: seconds for which the others wait for a member at the end of a round, and in an exchange; who is later
            is left out.
        patience: seconds in which the founders must all have come, and others be let in.
        communicator: how members add what they have, see `renkei.create_communicator`.
        device: where this member computes.

    Raises:
        UsageError: a number makes no sense, or there is no such communicator or device.
    """
    if not isinstance(founders, int) or founders < 1:
        raise UsageError(f"founders is {founders!r}, but must be a whole number, at least 1")
    for name, seconds in (("deadline", deadline), ("patience", patience)):
        if not 0 < seconds < math.inf:
            raise UsageError(f"{name} is {seconds} s, but must be a number above 0")
    read_name(communicator)
    options = Options(device=choose_device(device), address=_own_address(store), timeout=deadline)
    return Members(
        store, founders=founders, deadline=deadline, patience=patience, communicator=communicator, options=options
    )


def _own_address(store: dist.Store) -> str:
    """This host's address as others reach it who reach the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, dist.TCPStore) else "localhost"
    return "127.0.0.1" if is_loopback(host) else address_towards(host)


class Members:
    """One of the members, as `join` makes it.

    Attributes:
        number: this member's.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        founders: int,
        deadline: float,
        patience: float,
        communicator: str,
        options: Options,
    ) -> None:
        self._store = connect_anew(dist.PrefixStore("members", store), 0)
        self._founders, self._deadline, self._patience = founders, deadline, patience
        self._communicator, self._options = communicator, options
        self._hello = ["", socket.gethostname()]
        self.number = -1
        self._attendance = before_all(founders)
        self._voters: Sequence[int] = range(founders)
        self._comm: Communicator | None = None
        self._connected: Sequence[int] = []

    @property
    def present(self) -> Sequence[int]:
        """The numbers of those that take part in this round."""
        return self._attendance.members

    # -- who takes part -------------------------------------------------------------------------------------------

    def enter(self, what: str) -> Attendance:
        """Take part from now on: as one of those that begin, or from the next meeting of the others.

        Args:
            what: describes what is trained; those that don't say the same are refused.

        Raises:
            UsageError: something else is trained here.
            LaunchError: nobody lets this one in.
        """
        self._hello[0] = what
        return self._guarded(self._enter)

    def meet(self, *, is_leaving: bool = False) -> Attendance:
        """Decide with the others who takes part in this round; those that don't come in time are left out.

        A member that was left out itself, for it came too late, enters again, as one that is new.

        Args:
            is_leaving: whether this is the last round of this member.

        Raises:
            PeerLostError: nobody is there any more that has the training's state, or the store has gone.
        """
        return self._guarded(lambda: self._meet(LEAVE if is_leaving else STAY, self._deadline))

    def agree(self, *, well: bool) -> bool:
        """Whether all members got through the round, so that what was exchanged in it counts: the same answer for all.

        Args:
            well: whether this one did; where not, its connections are dropped, so that others notice.
        """
        if not well:
            self._disconnect()
        return self._guarded(lambda: self._agree(well))

    def connect(self) -> Communicator:
        """The communicator of those that take part in this round; connecting them anew is a collective operation.

        Raises:
            PeerLostError, DeadlineError: another member has gone, or does not come.
        """
        members = self.present
        if self._comm is None or self._connected != members:
            self._disconnect()
            hosts = [json.loads(self._store.get(f"hello/{member}"))[1] for member in members]
            chosen = choose(read_name(self._communicator), hosts, self._options.device)
            options = replace(self._options, backend=chosen.backend, backend_within=chosen.backend_within)
            self._comm = COMMUNICATORS[chosen.algorithm](
                dist.PrefixStore(f"group/{self._attendance.round}", self._store),
                rank=members.index(self.number),
                nodes=hosts,
                options=options,
            )
            self._connected = members
        return self._comm

    def close(self) -> None:
        """Drop the connections to other members."""
        self._disconnect()

    # -- how ------------------------------------------------------------------------------------------------------

    def _enter(self) -> Attendance:
        self.number = self._store.add("tickets", 1) - 1
        self._store.set(f"hello/{self.number}", json.dumps(self._hello))
        if self.number < self._founders:
            return self._meet(STAY, self._patience)
        return self._attend(self._await_invitation())

    def _await_invitation(self) -> int:
        """The number of the first round of this one, which the others decide."""
        end = time.monotonic() + self._patience
        key = f"invited/{self.number}"
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise LaunchError(
                    f"member {self.number} was not let in for {self._patience:g} s; is anybody of the training still "
                    f"there, and did it begin with {self._founders} members?"
                )
            time.sleep(min(_LOOK_EVERY, self._deadline / 10))
        invitation = json.loads(self._store.get(key))
        if isinstance(invitation, str):
            raise UsageError(f"member {self.number}: {invitation}")
        return int(invitation)

    def _meet(self, vote: str, timeout: float) -> Attendance:
        number = self._attendance.round + 1
        self._vote(f"attendance/{number}", vote, timeout, self._conclude)
        return self._attend(number)

    def _attend(self, number: int) -> Attendance:
        """Take part in a round of which it is decided who does."""
        attendance = Attendance(**json.loads(self._store.get(f"attendance/{number}/decision")))
        if not attendance.members:
            raise PeerLostError(
                f"member {self.number}: nobody is left that has the training's state; begin anew, from a checkpoint"
            )
        if self.number not in attendance.members:
            return self._come_back()
        for member in attendance.members:
            self._store.set(f"invited/{member}", json.dumps(number))
        for member in attendance.refused:
            self._store.set(f"invited/{member}", json.dumps("another model or outer optimizer is trained here"))
        self._attendance = attendance
        self._voters = attendance.members
        return attendance

    def _conclude(self, votes: Mapping[int, str]) -> dict[str, Any]:
        """What is decided: who of the voters is there, and who has come meanwhile."""
        num_come = max(self._founders, self._store.add("tickets", 0))
        fits = {}
        for member in self._attendance.waiting(num_come):
            if self._store.check([f"hello/{member}"]):
                fits[member] = json.loads(self._store.get(f"hello/{member}"))[0] == self._hello[0]
        return asdict(self._attendance.after(votes, num_come, fits))

    def _come_back(self) -> Attendance:
        print(
            f"renkei: member {self.number} came too late, so that the others have gone on without it; it enters again, "
            "and what it has done counts in the next round",
            file=sys.stderr,
            flush=True,
        )
        return self._enter()

    def _agree(self, well: bool) -> bool:
        members = self._attendance.members
        topic = f"agreement/{self._attendance.round}"
        found = self._vote(topic, well, self._deadline, lambda votes: [[*votes], [*votes.values()]])
        self._voters, verdicts = found
        if len(verdicts) < len(members) or not all(verdicts):
            self._disconnect()
            return False
        self._attendance = self._attendance.agreed()
        self._voters = self._attendance.staying
        return True

    def _vote(self, topic: str, vote: Any, timeout: float, conclude: Callable[[Mapping[int, Any]], Any]) -> Any:
        return decide(
            self._store,
            topic,
            voter=self.number,
            vote=vote,
            voters=self._voters,
            timeout=timeout,
            conclude=conclude,
        )

    def _guarded(self, run: Callable[[], T]) -> T:
        """Call something that uses the store."""
        try:
            return run()
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise translate(error, rank=self.number, doing="a meeting of members at their store") from None

    def _disconnect(self) -> None:
        if self._comm is not None:
            self._comm.close()
        self._comm, self._connected = None, []
