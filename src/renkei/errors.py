"""Every error Renkei raises.

RenkeiError
├── UsageError            the caller's mistake: one line, exit code 2
│   ├── LaunchError       the processes of a job can't find or don't fit one another
│   ├── MismatchError     ranks disagree about what they call, send or have built
│   └── UnevenBatchError  ranks have different numbers of samples where equal ones were promised
├── GradientError         a gradient came where none could be exchanged any more
├── PeerLostError         another rank has gone: the cause is to be found there, not here
├── DeadlineError         a wait lasted longer than allowed
└── RankFailedError       what `renkei.run` raises when a rank of it failed

A message says on which rank, what was found, what was expected, and what to do.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, TypeVar

Raised = TypeVar("Raised", bound=BaseException)


class RenkeiError(Exception):
    """Base of all errors raised by Renkei."""

    exit_code = 1


class UsageError(RenkeiError, ValueError):
    """Renkei was asked for something that can't be; nothing was started or changed."""

    exit_code = 2


class LaunchError(UsageError):
    """The processes of a job can't find one another, or what they were told contradicts itself."""


class MismatchError(UsageError):
    """Ranks disagree about the operation they call, the tensor they send or the model they built.

    Raised on every rank of the communicator with the same text.
    """


class UnevenBatchError(UsageError):
    """Ranks hold different numbers of samples and the loss carries no weight."""


class GradientError(RenkeiError, RuntimeError):
    """A gradient arrived after its bucket was sent, or ranks exchange gradients of different steps."""


class PeerLostError(RenkeiError, RuntimeError):
    """Another rank ended or closed its connection while this one waited for it."""


class DeadlineError(RenkeiError, TimeoutError):
    """A wait for other ranks lasted longer than its deadline."""


def afresh(error: Raised) -> Raised:
    """A copy to raise of an error that is kept: the frames it passes through are then not kept with that."""
    try:
        copied = copy.copy(error)
    except TypeError:  # a class that isn't made from its arguments
        return error
    return copied.with_traceback(error.__traceback__)


class RankFailedError(RenkeiError, RuntimeError):
    """A rank of `renkei.run` failed.

    Attributes:
        rank: the rank that failed first.
        traceback_text: its traceback.
    """

    def __init__(self, message: str, *, rank: int, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[Any, ...]:
        """An exception is pickled as a call with its positional arguments, which doesn't fit this one."""
        return partial(type(self), rank=self.rank), self.args, self.__dict__
