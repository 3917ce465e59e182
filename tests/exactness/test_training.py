"""The trainer on N ranks trains as one process does, batch for batch: weights, learning rates and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import build
from renkei.communicators.communicator import Communicator
from renkei.data.datasets import ImageDataset, synthetic
from renkei.data.loader import DataLoader
from renkei.data.scatter import scatter_dataset
from renkei.data.sharding import permutation
from renkei.models.convnet import ConvNet, perceptron
from renkei.optim.multi_node import MultiNodeOptimizer
from renkei.optim.schedules import cosine, gradual_warmup
from renkei.testing import run_on_ranks
from renkei.training import trainer as trainer_module
from renkei.training.trainer import Progress, Trainer

NUM_SAMPLES, BATCH, EPOCHS = 49, 16, 5  # 20 steps; the last batch of an epoch is one sample, so most ranks have none
SEED = 4
SCHEDULE = gradual_warmup(cosine(0.2, epochs=EPOCHS), epochs=1.5, start=0.1)
LOSS = nn.CrossEntropyLoss(label_smoothing=0.1)
SIZES = [1, 2, 3, 4]


@dataclass(frozen=True)
class Trained:
    """What a training leaves: weights, and for each step its learning rate, loss and share of right answers."""

    weights: list[Tensor]
    learning_rates: list[float]
    losses: list[float]
    top1: list[float]


def dataset() -> ImageDataset:
    return synthetic(NUM_SAMPLES, (1, 4, 4), num_classes=5, seed=1)


def network() -> nn.Module:
    return build(lambda: perceptron(16, 12, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-3)


def create_trainer(comm: Communicator, model: nn.Module, log: list[Progress], micro_batch_size: int | None) -> Trainer:
    loader = DataLoader(scatter_dataset(dataset(), comm, shuffle=True, seed=SEED), comm, global_batch_size=BATCH)
    return Trainer(
        model,
        MultiNodeOptimizer(sgd(model), comm, model=model),
        loader,
        loss=LOSS,
        schedule=SCHEDULE,
        micro_batch_size=micro_batch_size,
        report=log.append,
        report_every=1,
    )


def trained(size: int, micro_batch_size: int | None = None) -> list[Trained]:
    """By rank, what the trainer does."""

    def body(comm: Communicator) -> Trained:
        model, log = network(), list[Progress]()
        trainer = create_trainer(comm, model, log, micro_batch_size)
        for _ in range(EPOCHS):
            trainer.run_epoch()
        assert [progress.step for progress in log] == list(range(1, 21))
        trainer.optimizer.close()
        return Trained(
            [parameter.detach().clone() for parameter in model.parameters()],
            [progress.learning_rate for progress in log],
            [progress.means["loss"] for progress in log],
            [progress.means["top1"] for progress in log],
        )

    return run_on_ranks(size, body)


def trained_plainly() -> Trained:
    """The same training written out, in one process, without Renkei."""
    model, data = network(), dataset()
    optimizer = sgd(model)
    result = Trained([parameter.detach() for parameter in model.parameters()], [], [], [])
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(NUM_SAMPLES, seed=SEED, epoch=epoch))
        for begin in range(0, NUM_SAMPLES, BATCH):
            images, labels = data.images[order[begin : begin + BATCH]], data.labels[order[begin : begin + BATCH]]
            result.learning_rates.append(SCHEDULE((epoch * NUM_SAMPLES + begin) / NUM_SAMPLES))
            optimizer.param_groups[0]["lr"] = result.learning_rates[-1]
            optimizer.zero_grad()
            output = model(images)
            LOSS(output, labels).backward()
            optimizer.step()
            result.losses.append(float(nn.functional.cross_entropy(output.detach(), labels)))
            result.top1.append(float((output.argmax(dim=1) == labels).double().mean()))
    return result


# -- the checks ---------------------------------------------------------------------------------------------------


def check_weights(size: int, micro_batch_size: int | None = None) -> None:
    expected = trained_plainly().weights
    by_rank = trained(size, micro_batch_size)
    for each in by_rank:
        for found, right, first in zip(each.weights, expected, by_rank[0].weights, strict=True):
            assert float((found - right).norm() / right.norm()) < 1e-5
            assert torch.equal(found, first)


def check_learning_rates(size: int) -> None:
    expected = trained_plainly().learning_rates
    for each in trained(size):
        assert each.learning_rates == expected


def check_means(size: int, micro_batch_size: int | None = None) -> None:
    expected = trained_plainly()
    for each in trained(size, micro_batch_size):
        assert each.losses == pytest.approx(expected.losses, rel=1e-4)
        assert each.top1 == pytest.approx(expected.top1, abs=1e-9)


def check_statistics_are_alike_after_an_epoch(size: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model = build(lambda: ConvNet(1, widths=(3, 4), strides=(1, 2), num_classes=5))
        trainer = create_trainer(comm, model, [], None)
        trainer.run_epoch()
        trainer.optimizer.close()
        return [buffer.double() for name, buffer in model.named_buffers() if name.endswith(("mean", "var"))]

    first, *others = run_on_ranks(size, body)
    assert len(first) == 4
    for buffers in others:
        assert all(torch.equal(mine, rank_0s) for mine, rank_0s in zip(buffers, first, strict=True))


# -- and that they hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_weights_are_those_of_one_process_after_20_steps(size: int, micro_batch_size: int | None) -> None:
    check_weights(size, micro_batch_size)


@pytest.mark.parametrize("size", SIZES)
def test_the_learning_rate_follows_the_schedule_at_the_start_of_each_batch(size: int) -> None:
    check_learning_rates(size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_means_over_all_ranks_are_those_of_one_process(size: int, micro_batch_size: int | None) -> None:
    check_means(size, micro_batch_size)


@pytest.mark.parametrize("size", [2, 3])
def test_after_an_epoch_batch_norm_statistics_are_alike(size: int) -> None:
    check_statistics_are_alike_after_an_epoch(size)


def test_progress_tells_how_far_training_is_and_how_fast() -> None:
    def body(comm: Communicator) -> None:
        log: list[Progress] = []
        trainer = create_trainer(comm, network(), log, None)
        trainer.model.eval()
        trainer.run_epoch()
        assert trainer.model.training
        assert trainer.step == 4
        assert [progress.epoch for progress in log] == [16 / 49, 32 / 49, 48 / 49, 1.0]
        assert all(progress.samples_per_second > 0 for progress in log)
        assert all(sum(progress.shares.values()) == pytest.approx(1) for progress in log)
        seconds = trainer.seconds
        assert seconds > 0
        assert trainer.seconds == seconds  # evaluation, and whatever else follows, doesn't count
        trainer.optimizer.close()

    run_on_ranks(2, body)


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_the_weight_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = MultiNodeOptimizer.backward

    def all_count_alike(self: MultiNodeOptimizer, loss: Tensor | None, weight: float | None = None) -> None:
        honest(self, loss, None if loss is None else 1.0)

    monkeypatch.setattr(MultiNodeOptimizer, "backward", all_count_alike)
    with pytest.raises(AssertionError):
        check_weights(3)


def test_red_twin_a_rank_without_samples_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_zeros(self: Trainer, inputs: Tensor, target: Tensor) -> None:
        loss = LOSS(self.model(inputs), target) if len(target) else 0 * self.model(torch.zeros(1, 16)).sum()
        self.optimizer.backward(loss, weight=max(1, len(target)))

    monkeypatch.setattr(Trainer, "_backward", with_zeros)
    with pytest.raises(AssertionError):
        check_weights(3)


def test_red_twin_only_the_last_micro_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., Any] = Trainer._pieces
    monkeypatch.setattr(Trainer, "_pieces", lambda self, *batch: [list(honest(self, *batch))[-1]])
    with pytest.raises(AssertionError):
        check_weights(2, micro_batch_size=3)


def test_red_twin_the_learning_rate_is_that_of_the_end_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_the_end(self: Trainer) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = SCHEDULE(self.loader.samples / NUM_SAMPLES)

    monkeypatch.setattr(Trainer, "_set_learning_rate", at_the_end)
    with pytest.raises(AssertionError):
        check_learning_rates(2)


def test_red_twin_the_mean_of_ranks_means(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_of_means(metrics: Any, total: Tensor) -> dict[str, float]:
        return dict(zip(metrics, (total[:-1] / total[-1]).tolist(), strict=True))

    def over_all_ranks(self: trainer_module.WeightedMeans, comm: Communicator) -> dict[str, float]:
        mine = torch.zeros(3, dtype=torch.float64) if self._sums is None else self._sums / self._sums[-1]
        return mean_of_means(self._metrics, comm.all_reduce(mine))

    monkeypatch.setattr(trainer_module.WeightedMeans, "over_all_ranks", over_all_ranks)
    with pytest.raises(AssertionError):
        check_means(3)


def test_red_twin_statistics_that_are_not_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "pool_batch_norm", lambda model, comm, num_samples: None)
    with pytest.raises(AssertionError):
        check_statistics_are_alike_after_an_epoch(2)
