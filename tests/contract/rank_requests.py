"""What a test asks of a rank that is another process: to make a communicator and call a check with it."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import cloudpickle

from renkei.communicators import factory
from renkei.communicators.communicator import Communicator
from renkei.communicators.job import join


@dataclass(frozen=True)
class Request:
    """The same for all ranks.

    Attributes:
        spec: the communicator, as `renkei.create_communicator` takes it.
        check: called with the communicator and `args`.
        nodes: by rank, the node it pretends to be on; None for where it is.
        options: for `renkei.create_communicator`.
    """

    spec: str
    check: Callable[..., Any]
    args: tuple[Any, ...]
    nodes: Sequence[str] | None
    options: dict[str, Any]

    def create_communicator(self) -> Communicator:
        """A new one, whatever became of those before."""
        job = join() if self.nodes is None else replace(join(), nodes=tuple(self.nodes))
        with mock.patch.object(factory, "join", return_value=job):
            return factory.create_communicator(self.spec, **self.options)


@dataclass(frozen=True)
class Answer:
    """What the check returned on a rank, or raised; by the clock that all processes of a machine share."""

    result: Any = None
    error: BaseException | None = None
    time: float = 0.0


def carry_out(request: bytes) -> bytes:
    """The answer to a request, whatever happens; both pickled."""
    comm: Communicator | None = None
    try:
        asked: Request = pickle.loads(request)
        comm = asked.create_communicator()
        return cloudpickle.dumps(Answer(asked.check(comm, *asked.args)))
    except BaseException as error:
        return _pickle_failure(error, time.monotonic())
    finally:
        if comm is not None:
            comm.close()


def _pickle_failure(error: BaseException, now: float) -> bytes:
    """The error itself where it can be sent, since tests look at its type and text."""
    trace = f"on rank {join().rank} of {join().size}:\n" + "".join(traceback.format_exception(error))
    error.add_note(trace)
    try:
        failure = pickle.dumps(Answer(error=error, time=now))
        pickle.loads(failure)
    except Exception:
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        stand_in.add_note(trace)
        return pickle.dumps(Answer(error=stand_in, time=now))
    return failure
