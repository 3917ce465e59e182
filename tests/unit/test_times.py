"""Where the time of steps goes: on scripted clocks, and on ranks of which one is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from renkei.communicators.communicator import Communicator
from renkei.data.datasets import synthetic
from renkei.data.loader import DataLoader
from renkei.models.convnet import perceptron
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.testing import run_on_ranks
from renkei.training import times
from renkei.training.times import PARTS, Stopwatch, divide, shares
from renkei.training.trainer import Progress, Trainer

NOTHING = dict.fromkeys(PARTS, 0.0)


class Clock:
    """Shows the time it was set to."""

    now = waited = 0.0

    def load(self, *seconds: float) -> Iterator[float]:
        """A loader that takes so long for each batch, and gives it."""
        for each in seconds:
            self.now += each
            yield each


def check_a_scripted_epoch() -> None:
    clock = Clock()
    watch = Stopwatch(lambda: clock.waited, lambda: clock.now)
    for batch in watch.batches(clock.load(1.0, 2.0)):
        clock.now += 10 + batch
        clock.waited += 3
        watch.end_step()
        clock.now += 100  # a report, say
        clock.waited += 100
    assert watch.take().tolist() == [[1, 8, 3], [2, 9, 3]]
    assert watch.take().shape == (0, 3)


def test_a_step_lasts_from_when_its_batch_is_asked_for_until_it_is_made() -> None:
    check_a_scripted_epoch()


def test_red_twin_a_report_that_counts_as_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Stopwatch, loader: Iterator[float]) -> Iterator[float]:
        for batch in loader:
            self._came = self._clock()
            yield batch

    monkeypatch.setattr(Stopwatch, "batches", late)
    with pytest.raises(AssertionError):
        check_a_scripted_epoch()


def waits(arrivals: list[float], takes: float) -> list[float]:
    """How long ranks wait that come to a sum when they do, on clocks that don't agree; it ends on all together."""
    end = max(arrivals) + takes
    return [end - each for each in arrivals]


def test_what_is_waited_above_the_least_is_for_the_slowest_rank() -> None:
    arrivals = [0.7, 1.9, 0.2]
    waited = waits(arrivals, takes=0.3)
    for arrival, own in zip(arrivals, waited, strict=True):
        step = torch.tensor([[0.05, arrival, own]], dtype=torch.float64)
        assert divide(step, torch.tensor([min(waited)])) == {
            "data": [50],
            "computing": pytest.approx([1000 * arrival]),
            "communication": pytest.approx([300]),
            "waiting": pytest.approx([1000 * (1.9 - arrival)]),
        }


def test_shares_are_of_all() -> None:
    assert shares(torch.tensor([1.0, 5.0, 4.0, 0.0])) == dict(zip(PARTS, [0.1, 0.5, 0.4, 0.0], strict=True))
    assert shares(torch.zeros(4)) == NOTHING


# -- ranks --------------------------------------------------------------------------------------------------------

SLOW, NAP = 1, 0.1  # the rank, and how much longer each of its steps takes in seconds


class Sleepy(nn.Module):
    """A perceptron that is slow on one rank."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._net, self._naps = perceptron(4, 3), comm.rank == SLOW

    def forward(self, inputs: Tensor) -> Tensor:
        if self._naps:
            time.sleep(NAP)
        return self._net(inputs)


def progress_of(size: int, *, double_buffering: bool = False) -> list[list[Progress]]:
    """By rank, what it is told after each of two epochs of three steps, of which it is told."""

    def body(comm: Communicator) -> list[Progress]:
        told: list[Progress] = []
        torch.manual_seed(0)
        model = Sleepy(comm)
        loader = DataLoader(synthetic(3 * size, (1, 2, 2), num_classes=3, seed=1), comm, global_batch_size=size)
        optimizer = MultiNodeOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model, double_buffering=double_buffering
        )
        loss = nn.CrossEntropyLoss()
        trainer = Trainer(
            model, optimizer, loader, loss=loss, schedule=lambda _: 0.1, report=told.append, report_every=3
        )
        for _ in range(2):
            trainer.run_epoch()
        optimizer.close()
        return told

    return run_on_ranks(size, body)


def check_who_waits(told: list[list[Progress]]) -> None:
    for rank, both in enumerate(told):
        for progress in both:
            assert {name: len(part) for name, part in progress.step_ms.items()} == dict.fromkeys(PARTS, 3)
            assert (max(progress.step_ms["waiting"]) > 1000 * NAP / 2) == (rank != SLOW)
            assert (min(progress.step_ms["computing"]) > 1000 * NAP / 2) == (rank == SLOW)
            assert progress.shares == told[0][both.index(progress)].shares
            assert sum(progress.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("is_late", [False, True], ids=["punctual", "late"])
def test_ranks_wait_for_the_slow_one_and_it_for_nobody(is_late: bool) -> None:
    check_who_waits(progress_of(3, double_buffering=is_late))


def test_red_twin_the_least_of_this_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "divide", lambda steps, least: divide(steps, steps[:, 2]))
    with pytest.raises(AssertionError):
        check_who_waits(progress_of(3))


def test_one_rank_waits_for_nobody() -> None:
    (told,) = progress_of(1)
    assert [progress.step_ms["waiting"] for progress in told] == [[0.0] * 3] * 2


def test_without_steps_nothing_took_any_time() -> None:
    def body(comm: Communicator) -> None:
        parts, all_of_it = times.over_ranks(comm, torch.empty(0, 3, dtype=torch.float64))
        assert parts == {name: [] for name in PARTS}
        assert all_of_it == NOTHING

    run_on_ranks(2, body)
