"""Operations in line: who does them, how long one waits, and what is kept of a failure."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from renkei.communicators.backends.process_group import _followed_by
from renkei.communicators.backends.work import future_of
from renkei.communicators.work_queue import Operation, Transfer, WorkQueue
from renkei.errors import DeadlineError, afresh


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    made = WorkQueue("a queue")
    yield made
    made.close()


def test_a_callback_may_wait_for_what_comes_after_it(queue: WorkQueue) -> None:
    first, second = queue.submit(lambda: time.sleep(0.05)), None

    def begin_another(_: object) -> object:
        nonlocal second
        second = queue.submit(lambda: None)
        return future_of(second, "second").wait()

    assert future_of(first, "first").then(begin_another).wait() == "second"


def test_red_twin_a_callback_on_the_thread_that_works_can_not(queue: WorkQueue) -> None:
    raw: torch.futures.Future[None] = torch.futures.Future()
    came = threading.Event()
    queue.submit(lambda: time.sleep(0.05)).when_done(lambda: raw.set_result(None))
    raw.then(lambda _: came.set() if queue.submit(lambda: None).await_end(0.3) else None)
    assert not came.wait(0.5)


def test_the_thread_sleeps_while_somebody_else_does_what_is_first(queue: WorkQueue) -> None:
    late = threading.Event()
    first = queue.submit(late.wait, hurry=False)
    queue.submit(lambda: None, hurry=False)
    helper = threading.Thread(target=queue.wait, args=(first, 10.0))
    helper.start()
    time.sleep(0.7)  # as long as the thread looks by itself
    used = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - used
    late.set()
    helper.join()
    assert used < 0.25


class Local:
    """Something a caller has."""


def test_a_failure_that_is_kept_keeps_nothing_of_those_who_saw_it(queue: WorkQueue) -> None:
    def fail() -> None:
        raise DeadlineError("too late")

    operation = queue.submit(fail)

    def see() -> weakref.ref[Local]:
        local = Local()
        with pytest.raises(DeadlineError, match="too late"):
            queue.wait(operation, 1.0)
        return weakref.ref(local)

    seen = see()
    gc.collect()
    assert seen() is None
    assert operation.error is not None


def test_an_error_that_can_not_be_copied_is_raised_as_it_is() -> None:
    class Odd(Exception):
        def __init__(self, one: int, *, other: int) -> None:
            super().__init__(f"{one} and {other}")

    error = Odd(1, other=2)
    assert afresh(error) is error


def test_what_follows_a_message_is_waited_for_no_longer_than_asked() -> None:
    message, goes_on = Operation(lambda: None), threading.Event()
    followed = _followed_by(Transfer(message, lambda _: None), lambda: goes_on.wait())
    thread = threading.Thread(target=message.perform)
    thread.start()
    with pytest.raises(DeadlineError):
        followed.wait(0.1)
    goes_on.set()
    thread.join()
    followed.wait(1.0)
