"""Who takes part in a round, and what is decided over a store: the same for all, once and for ever."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from renkei.communicators.attendance import LEAVE, STAY, Attendance, before_all
from renkei.communicators.decision import decide

FOUNDED = before_all(3).after({0: STAY, 1: STAY, 2: STAY}, 3, {})


def test_founders_begin_and_have_the_state_once_they_have_agreed() -> None:
    assert FOUNDED.round == 0
    assert FOUNDED.members == [0, 1, 2]
    assert FOUNDED.holders == []
    assert FOUNDED.agreed().holders == [0, 1, 2]


def test_who_does_not_come_is_left_out_and_who_has_the_state_is_first() -> None:
    begun = FOUNDED.agreed()
    with_newcomers = begun.after({0: STAY, 2: STAY}, 5, {3: True, 4: False})
    assert with_newcomers.members == [0, 2, 3]
    assert with_newcomers.holders == [0, 2]  # until all have agreed
    assert with_newcomers.refused == [4]
    again = with_newcomers.after({3: STAY, 2: STAY}, 5, {})  # 0 was lost in the exchange, which so doesn't count
    assert again.members == [2, 3]
    assert again.holders == [2]


def test_who_leaves_takes_part_once_more() -> None:
    last = FOUNDED.agreed().after({0: STAY, 1: LEAVE, 2: STAY}, 3, {})
    assert last.members == [0, 1, 2]
    assert last.staying == [0, 2]
    assert last.agreed().holders == [0, 2]


def test_without_anybody_that_has_the_state_nothing_goes_on() -> None:
    joined = FOUNDED.agreed().after({0: STAY}, 4, {3: True})
    assert joined.after({3: STAY}, 4, {}).members == []


def test_who_has_a_number_but_has_said_nothing_is_waited_for() -> None:
    silent = FOUNDED.agreed().after({0: STAY, 1: STAY, 2: STAY}, 5, {4: True})
    assert silent.unheard == [3]
    assert silent.waiting(6) == [3, 5]
    assert 3 in silent.after({0: STAY, 1: STAY, 2: STAY, 4: STAY}, 6, {3: True}).members


@given(some.data())
def test_nobody_is_lost_or_counted_twice(data: some.DataObject) -> None:
    attendance, num_come = FOUNDED.agreed(), 3
    gone: set[int] = set()
    for _ in range(6):
        come = data.draw(some.sets(some.sampled_from(attendance.staying))) if attendance.staying else set()
        num_come += data.draw(some.integers(0, 2))
        heard = data.draw(some.lists(some.booleans(), min_size=num_come, max_size=num_come))
        waiting = attendance.waiting(num_come)
        fits = {member: True for member in waiting if heard[member]}
        votes = {member: data.draw(some.sampled_from([STAY, LEAVE])) for member in come}
        gone |= set(attendance.members) - come
        attendance = attendance.after(votes, num_come, fits)
        if not attendance.members:
            return
        assert len(set(attendance.members)) == len(attendance.members)
        assert set(attendance.members) == come | set(fits)
        assert not gone & set(attendance.members)
        assert set(attendance.members) | gone | set(attendance.unheard) == set(range(num_come))
        attendance = attendance.agreed()


# -- decisions --------------------------------------------------------------------------------------------------------


def ask(store: dist.Store, voter: int, found: dict[int, Any], delay: float = 0.0, timeout: float = 0.3) -> None:
    def conclude(votes: Mapping[int, Any]) -> Any:
        return {"by": voter, "votes": sorted(votes.items())}

    time.sleep(delay)
    how = {"voters": [0, 1, 2], "timeout": timeout, "conclude": conclude}
    found[voter] = decide(store, "which", voter=voter, vote=f"vote of {voter}", **how)


def ask_all(delays: Mapping[int, float], store: dist.Store | None = None) -> dict[int, Any]:
    store = store or dist.HashStore()
    found: dict[int, Any] = {}
    voters = [threading.Thread(target=ask, args=(store, voter, found, delay)) for voter, delay in delays.items()]
    for voter in voters:
        voter.start()
    for voter in voters:
        voter.join()
    return found


def test_all_find_the_same_with_all_votes() -> None:
    found = ask_all({0: 0.0, 1: 0.05, 2: 0.1})
    assert found[0] == found[1] == found[2]
    assert [vote for _, vote in found[0]["votes"]] == ["vote of 0", "vote of 1", "vote of 2"]


def test_who_does_not_come_is_left_out_and_who_comes_late_finds_that() -> None:
    found = ask_all({0: 0.0, 2: 0.0})
    assert found[0] == found[2]
    assert [voter for voter, _ in found[0]["votes"]] == [0, 2]
    found = ask_all({0: 0.0, 1: 0.6, 2: 0.2})
    assert found[0] == found[1] == found[2]
    assert [voter for voter, _ in found[0]["votes"]] == [0, 2]


def test_a_decision_wakes_those_that_would_still_wait() -> None:
    store = dist.HashStore()
    found: dict[int, Any] = {}
    patient = threading.Thread(target=ask, args=(store, 2, found), kwargs={"timeout": 20.0})
    patient.start()
    ask(store, 0, found)
    patient.join(5.0)
    assert not patient.is_alive()
    assert found[0] == found[2]


class Forgetful(dist.HashStore):
    """Lets decisions be made again."""

    def check(self, keys: list[str]) -> bool:
        return not keys[0].endswith("decision") and super().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.set(key, desired)
        return desired.encode()


def test_red_twin_a_decision_that_is_made_again_is_seen() -> None:
    found = ask_all({0: 0.0, 1: 0.6, 2: 0.2}, Forgetful())
    assert found[0] != found[1]


def test_an_attendance_can_be_read_back() -> None:
    assert Attendance(**json.loads(json.dumps(asdict(FOUNDED)))) == FOUNDED
