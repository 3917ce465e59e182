"""Deciding something once and for all over a store, with whoever votes in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from renkei.communicators.timeouts import is_timeout, milliseconds

_ABSENT = "null"  # the vote of those that have not come in time


def decide(
    store: dist.Store,
    topic: str,
    *,
    voter: int,
    vote: Any,
    voters: Sequence[int],
    timeout: float,
    conclude: Callable[[Mapping[int, Any]], Any],
) -> Any:
    """What is decided on a topic: the same for all that ask, and for ever.

    Whoever first has all votes, or has waited long enough for them, concludes; those that come later find it decided.

    Args:
        store: where they meet.
        topic: used for one decision only.
        voter: this voter's number.
        vote: what it has to say, which JSON can say; not None.
        voters: who is waited for, this one among them.
        timeout: seconds after which those that have not come are left out.
        conclude: makes the decision, which JSON can say, of the votes there are; is not always called.

    Raises:
        RuntimeError: the store has gone.
    """
    decision = f"{topic}/decision"
    if not store.check([decision]):
        store.set(f"{topic}/{voter}", json.dumps(vote))
        _await_all(store, [f"{topic}/{other}" for other in voters], timeout)
        if not store.check([decision]):
            votes = {other: _vote(store, f"{topic}/{other}") for other in voters}
            store.compare_set(decision, "", json.dumps(conclude({k: v for k, v in votes.items() if v is not None})))
            for other in voters:  # so that nobody goes on waiting for them
                store.compare_set(f"{topic}/{other}", "", _ABSENT)
    return json.loads(store.get(decision))


def _await_all(store: dist.Store, keys: list[str], timeout: float) -> None:
    try:
        store.wait(keys, milliseconds(timeout))
    except RuntimeError as error:
        if not is_timeout(str(error)):
            raise


def _vote(store: dist.Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None
