"""Members that come, leave, end and come late: what each has moved counts once, and all have the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import renkei
from renkei.communicators.membership import Members
from renkei.optim.local_updates import LocalUpdates
from renkei.optim.multi_node import MultiNodeOptimizer

EVERY = 3
DEADLINE = 0.7


class Gone(Exception):
    """A member ends, without a word to anybody."""


@dataclass
class Life:
    """What becomes of a member: in which round, if any."""

    begins_after: int = 0
    rounds: int = 9
    leaves_in: int | None = None
    ends_in: int | None = None
    ends_in_exchange: int | None = None
    late_in: int | None = None
    pause: float = 0.005  # seconds a step


@dataclass
class Told:
    """What a member tells of itself.

    Attributes:
        given: by round that counted, what this member gave then.
        moved: in all.
        shared: by round, what was shared after it.
        attended: by round, who took part.
    """

    given: dict[int, float] = field(default_factory=dict)
    moved: float = 0.0
    shared: dict[int, float] = field(default_factory=dict)
    attended: dict[int, list[int]] = field(default_factory=dict)
    problem: BaseException | None = None


class Watched(LocalUpdates):
    """Tells what it gives, once that counts."""

    def __init__(self, told: Told, life: Life, *args: Any, **how: Any) -> None:
        self.told, self.life = told, life
        super().__init__(*args, **how)

    def _exchange(self, exchanged: MultiNodeOptimizer) -> None:
        super()._exchange(exchanged)
        if self.life.ends_in_exchange == self.rounds and self.steps:
            raise Gone

    def _withdraw(self) -> None:
        if self._given is not None:
            del self.told.given[max(self.told.given)]
        super()._withdraw()

    def _commit(self, exchanged: MultiNodeOptimizer) -> None:
        moved = self._moved[0][0].item()
        if self._has_moved:
            self.told.given[self.rounds] = moved
        super()._commit(exchanged)
        self.told.shared[self.rounds] = self._shared[0][0].item()
        assert self._members is not None
        self.told.attended[self.rounds] = list(self._members._attendance.members)


def live(store: dist.Store, number: int, life: Life, told: Told, overlap: bool, founders: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    members = renkei.join(store, founders=founders, deadline=DEADLINE, patience=10.0)
    try:
        local = Watched(told, life, optimizer, members, every=EVERY, overlap=overlap)
        while local.rounds < life.rounds and not local.has_left:
            if local.rounds == life.leaves_in:
                local.leave()
            if local.rounds == life.ends_in:
                raise Gone
            if local.rounds == life.late_in:
                life.late_in = None
                time.sleep(2.5 * DEADLINE)
            parameter.grad = torch.full_like(parameter, -float(10**number))
            told.moved += 10**number
            optimizer.step()
            time.sleep(life.pause)
        if not local.has_left:
            local.flush()
            told.shared[local.rounds] = parameter[0].item()
    except Gone:
        if overlap and told.given:
            del told.given[max(told.given)]  # was on its way still, so that the others have withdrawn it
    except BaseException as error:
        told.problem = error
    finally:
        members.close()


def train(lives: list[Life], *, overlap: bool = False) -> list[Told]:
    """What members tell that train together, each a thread with a connection of its own to one store."""
    store = dist.HashStore()
    told = [Told() for _ in lives]
    founders = sum(life.begins_after == 0 for life in lives)
    threads = [
        threading.Thread(target=live, args=(store, number, life, told[number], overlap, founders))
        for number, life in enumerate(lives)
    ]
    for life, thread in zip(lives, threads, strict=True):
        deadline = time.monotonic() + 20
        while life.begins_after and max(told[0].shared, default=0) < life.begins_after:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    for each in told:
        if each.problem is not None:
            raise each.problem
    return told


def check_each_movement_counts_once(told: list[Told], lives: list[Life]) -> None:
    """What is shared went, in each round that counted, by the mean of what those gave that had moved at all."""
    rounds = sorted(told[0].shared)
    for one in told[1:]:  # all that were there share the same
        for number in set(one.shared) & set(rounds):
            assert one.shared[number] == pytest.approx(told[0].shared[number], rel=1e-12)
    total = 0.0
    for number in range(rounds[-1]):
        gave = [one.given[number] for one in told if number in one.given]
        total += sum(gave) / len(gave) if gave else 0.0
    assert told[0].shared[rounds[-1]] == pytest.approx(-total, rel=1e-12)
    for one, life in zip(told, lives, strict=True):
        if life.ends_in is None and life.ends_in_exchange is None:
            assert sum(one.given.values()) == pytest.approx(-one.moved, rel=1e-12)


LIVES: dict[str, Callable[[], list[Life]]] = {
    "nobody comes or goes": lambda: [Life(), Life(), Life()],
    "one leaves": lambda: [Life(), Life(leaves_in=3), Life()],
    "the first leaves": lambda: [Life(rounds=9), Life(rounds=9), Life(leaves_in=2)],
    "one joins": lambda: [Life(), Life(), Life(begins_after=2)],
    "one ends among steps": lambda: [Life(), Life(ends_in=3), Life()],
    "one ends in an exchange": lambda: [Life(), Life(), Life(ends_in_exchange=4)],
    "two end, one joins": lambda: [Life(), Life(ends_in=2), Life(ends_in_exchange=3), Life(begins_after=1)],
    "one leaves while one joins": lambda: [Life(), Life(leaves_in=2), Life(begins_after=1)],
    "one comes late": lambda: [Life(pause=0.06, rounds=12), Life(pause=0.06, rounds=12), Life(rounds=12, late_in=2)],
    "all but one are gone": lambda: [Life(), Life(ends_in=2), Life(leaves_in=4)],
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("what", LIVES)
def test_each_movement_counts_once_whoever_comes_and_goes(what: str, overlap: bool) -> None:
    lives = LIVES[what]()
    check_each_movement_counts_once(train(lives, overlap=overlap), lives)


@pytest.mark.parametrize("defect", ["not given again", "counted though it broke off"])
def test_red_twin_what_broke_off_and_is_lost_or_counted_is_seen(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "not given again":
        monkeypatch.setattr(LocalUpdates, "_withdraw", lambda self: setattr(self, "_given", None))
    else:
        agree = Members.agree
        monkeypatch.setattr(Members, "agree", lambda self, *, well: agree(self, well=well) or well)
    lives = [Life(), Life(), Life(ends_in_exchange=4)]
    with pytest.raises(AssertionError):
        check_each_movement_counts_once(train(lives, overlap=defect == "not given again"), lives)


def test_after_leaving_steps_are_ones_own_and_other_hooks_are_called() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    members = renkei.join(dist.HashStore(), founders=1, deadline=DEADLINE)
    local = LocalUpdates(optimizer, members, every=2)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(local.rounds))
    local.leave()
    for _ in range(5):
        parameter.grad = -torch.ones(3)
        optimizer.step()
    local.flush()
    assert local.has_left
    assert calls == [0, 1, 1, 1, 1]
    assert parameter.tolist() == [5.0] * 3
    local.close()


def test_a_newcomer_that_trains_something_else_is_refused_and_the_others_go_on() -> None:
    store = dist.HashStore()
    found: list[Any] = []

    def body(size: int) -> None:
        parameter = torch.nn.Parameter(torch.zeros(size))
        members = renkei.join(store, founders=2, deadline=5.0, patience=10.0)
        try:
            local = LocalUpdates(torch.optim.SGD([parameter], lr=1.0), members, every=2)
            for _ in range(40):
                parameter.grad = torch.ones(size)
                local.inner.step()
                time.sleep(0.01)
            local.flush()
            found.append(parameter.tolist())
        except renkei.UsageError as error:
            found.append(str(error))
        finally:
            members.close()

    threads = [threading.Thread(target=body, args=(5,)) for _ in range(2)]
    threads.append(threading.Thread(target=body, args=(6,)))
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, found))[:2] == [str([-40.0] * 5)] * 2
    assert "another model" in next(each for each in found if isinstance(each, str))


def test_who_is_let_in_by_nobody_says_so() -> None:
    store = dist.HashStore()
    store.add("members/tickets", 2)  # two that have gone
    members = renkei.join(store, founders=2, deadline=0.5, patience=0.6)
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(renkei.LaunchError, match=r"was not let in for 0\.6 s"):
        LocalUpdates(torch.optim.SGD([parameter], lr=1.0), members, every=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"founders": 0}, "founders is 0"),
        ({"founders": 1, "deadline": -1.0}, "deadline is -1"),
        ({"founders": 1, "patience": float("nan")}, "patience is nan"),
        ({"founders": 1, "communicator": "flut"}, "flat"),
    ],
)
def test_wrong_use_is_told(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(renkei.UsageError, match=said):
        renkei.join(dist.HashStore(), **wrong)
