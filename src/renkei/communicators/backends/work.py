"""What torch holds while an operation of ours is on its way."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from renkei.communicators.work_queue import Operation, Transfer


class TransportWork(dist.Work):
    """An operation on its way, for torch: C++ reaches `wait` and `get_future`, Python gets this very object."""

    def __init__(self, transfer: Transfer, timeout: float, result: Any) -> None:
        super().__init__()
        self._transfer, self._timeout, self._result = transfer, timeout, result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is complete; raise what it raised."""
        self._transfer.wait(timeout.total_seconds() if timeout else self._timeout)  # zero is no timeout of its own
        return True

    def synchronize(self) -> None:
        """The same: results are in place when an operation is complete, on GPUs too."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is complete, or failed."""
        return self._transfer.operation.is_done

    def is_success(self) -> bool:
        """Whether it is complete and has not failed."""
        return self._transfer.operation.is_done and self._transfer.operation.error is None

    def exception(self) -> BaseException | None:
        """Why it failed."""
        return self._transfer.operation.error

    def result(self) -> Any:
        """The tensors it was given to fill."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the result. Made only when asked for, since most work is just waited for."""
        if self._future is None:
            self._future = future_of(self._transfer.operation, self._result)
            self._transfer.hurry()  # who waits for a future can't help
        return self._future

    def _source_rank(self) -> int:
        """From which rank a message came, if that was left open; torch asks for it by this name."""
        assert self._transfer.source is not None
        return self._transfer.source()


def future_of(operation: Operation, result: Any) -> torch.futures.Future[Any]:
    """A future of torch that has `result` when an operation is done, or what it failed with.

    What waits for the future is called back on a thread of its own: it may wait for further operations, which those
    that do them could then not do.
    """
    raw: torch.futures.Future[Any] = torch.futures.Future()

    def result_or_raise(_: object) -> Any:
        if operation.error is not None:
            raise operation.error
        return result

    def complete() -> None:
        threading.Thread(target=raw.set_result, args=(None,), name="renkei future", daemon=True).start()

    # Only an exception raised by a callback is one for C++, too; `set_exception` is a result like any other.
    future = raw.then(result_or_raise)
    operation.when_done(complete)
    return future
