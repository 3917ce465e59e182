"""Who has left a group. MPI doesn't tell, so a store does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed as dist

_BETWEEN_LOOKS = 0.5  # seconds
_PATIENCE = 1.0  # seconds for the store to take a farewell
_connections: dict[tuple[int, str, int], dist.Store] = {}
_connecting = threading.Lock()


class Farewells:
    """Tells the other ranks that this one has left, and after how many collectives, and this one who of them has.

    Args:
        store: of all ranks, perhaps among others.
        name: of the group: nothing else in the store is called so.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self._store: Any = dist.PrefixStore(f"farewells/{name}", _connect(store))
        self._rank, self._size = rank, size
        self._asking = threading.Thread()  # a store may take for ever to answer, which no wait may
        self._last_look = 0.0
        self._num_left = 0
        self._left: dict[int, int] = {}

    def leave(self, num_collectives: int) -> None:
        """Tell the others that this rank has left after so many collectives."""
        self._await_answer()
        self._ask(lambda store: (store.set(f"left/{self._rank}", str(num_collectives)), store.add("left", 1)))
        self._await_answer()
        self._store = None

    def look(self) -> Mapping[int, int]:
        """The other ranks that are known to have left, and after how many collectives; the store is asked meanwhile."""
        now = time.monotonic()
        if now - self._last_look > _BETWEEN_LOOKS and not self._asking.is_alive():
            self._last_look = now
            self._ask(self._update)
        return self._left

    def _update(self, store: Any) -> None:
        num_left = store.add("left", 0)
        if num_left != self._num_left:
            others = [rank for rank in range(self._size) if rank not in (self._rank, *self._left)]
            new = [rank for rank in others if store.check([f"left/{rank}"])]
            self._left = self._left | {rank: int(store.get(f"left/{rank}")) for rank in new}
            self._num_left = num_left

    def _ask(self, question: Callable[[Any], object]) -> None:
        """Begin to ask the store."""
        if self._store is not None:
            self._asking = threading.Thread(
                target=self._put, args=(question, self._store), name="renkei farewells", daemon=True
            )
            self._asking.start()

    def _await_answer(self) -> None:
        if self._asking.is_alive():
            self._asking.join(_PATIENCE)

    def _put(self, question: Callable[[Any], object], store: Any) -> None:
        try:
            question(store)
        except RuntimeError:  # who holds the store has ended, so nothing is to be learnt any more
            self._store = None
            _connections.clear()


def _connect(store: dist.Store) -> dist.Store:
    """A connection to a store that no thread waits over, which would keep others from it; one for all groups.

    Making one may take seconds, where names of hosts can't be looked up.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return cast(Any, store).clone()
    address = (os.getpid(), store.host, store.port)
    with _connecting:
        if address not in _connections:
            _connections[address] = cast(Any, store).clone()
        return _connections[address]
