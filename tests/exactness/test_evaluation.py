"""Evaluation gives the same bits on any number of ranks, counts every sample once, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import build
from renkei.communicators.communicator import Communicator
from renkei.data.datasets import ImageDataset, digits
from renkei.data.scatter import scatter_dataset
from renkei.errors import MismatchError, UsageError
from renkei.models.convnet import ConvNet, perceptron
from renkei.testing import run_on_ranks
from renkei.training import evaluation
from renkei.training.evaluation import evaluate, gather_by_sample, predict
from renkei.training.metrics import METRICS

SIZES = [1, 2, 3, 4]

# samples and batch size: the last batch smaller, a single sample, fewer batches than ranks, one batch, many small ones
AWKWARD = [(359, 64), (1, 64), (100, 64), (359, 512), (359, 7)]


def convnet() -> nn.Module:
    """A network whose outputs depend on its mode: with batch normalization and dropout."""
    return build(lambda: ConvNet(1, widths=(8, 8), strides=(1, 2), num_classes=10, dropout=0.5))


def some_digits(length: int) -> ImageDataset:
    return digits().select(np.arange(length))


def on_ranks(size: int, call: Callable[[nn.Module, Communicator], Any]) -> list[Any]:
    def body(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        return call(convnet(), comm)

    return run_on_ranks(size, body)


def evaluated(size: int, length: int, batch_size: int) -> list[dict[str, float]]:
    dataset = some_digits(length)
    return on_ranks(size, lambda model, comm: evaluate(model, dataset, comm, batch_size=batch_size, metrics=METRICS))


def plain_evaluation(length: int, batch_size: int) -> dict[str, float]:
    """What a loop in one process says."""
    dataset, model = some_digits(length), convnet().eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in zip(dataset.images.split(batch_size), dataset.labels.split(batch_size), strict=True):
            output = model(images)
            correct += int((output.argmax(dim=1) == labels).sum())
            loss += float(nn.functional.cross_entropy(output, labels, reduction="sum"))
    return {"loss": loss / length, "top1": correct / length}


# -- the checks ---------------------------------------------------------------------------------------------------


def check_same_bits_on_any_number_of_ranks(length: int, batch_size: int) -> None:
    (expected,) = evaluated(1, length, batch_size)
    for size in SIZES[1:]:
        assert evaluated(size, length, batch_size) == [expected] * size


def check_equal_to_a_plain_loop(size: int, length: int, batch_size: int) -> None:
    expected = plain_evaluation(length, batch_size)
    for result in evaluated(size, length, batch_size):
        assert result["top1"] == expected["top1"]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


# -- evaluate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "batch_size"), AWKWARD)
def test_the_result_has_the_same_bits_on_any_number_of_ranks(length: int, batch_size: int) -> None:
    check_same_bits_on_any_number_of_ranks(length, batch_size)


@pytest.mark.parametrize(("length", "batch_size"), AWKWARD)
def test_the_result_is_that_of_a_plain_loop(length: int, batch_size: int) -> None:
    check_equal_to_a_plain_loop(3, length, batch_size)


def test_a_scattered_dataset_is_evaluated_whole() -> None:
    def body(model: nn.Module, comm: Communicator) -> dict[str, float]:
        dataset = scatter_dataset(some_digits(101), comm, shuffle=True, seed=0)
        return evaluate(model, dataset, comm, batch_size=16, metrics=METRICS)

    assert on_ranks(3, body) == evaluated(1, 101, 16) * 3


def test_ranks_with_different_samples_are_told_so() -> None:
    def body(model: nn.Module, comm: Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            evaluate(model, some_digits(5 + comm.rank), comm, batch_size=2, metrics=METRICS)
        return str(caught.value)

    (text,) = set(on_ranks(2, body))
    assert "rank 0: 5 in batches of 2, rank 1: 6 in batches of 2" in text


def check_different_models_are_told() -> None:
    def body(model: nn.Module, comm: Communicator) -> str:
        if comm.rank == 2:
            next(value for name, value in model.named_buffers() if "running_mean" in name).add_(1e-6)
        with pytest.raises(MismatchError) as caught:
            evaluate(model, some_digits(5), comm, batch_size=2, metrics=METRICS)
        return str(caught.value)

    (text,) = set(on_ranks(3, body))
    assert "rank 2 has another value of" in text
    assert "running_mean" in text
    assert "pool_batch_norm" in text


def test_statistics_that_were_not_pooled_are_told_on_all_ranks() -> None:
    check_different_models_are_told()


def test_red_twin_models_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_check_alike", lambda model, comm: None)
    with pytest.raises(pytest.fail.Exception):
        check_different_models_are_told()


def test_a_metric_that_is_a_mean_over_the_batch_is_refused() -> None:
    metrics = {"loss": nn.functional.cross_entropy}
    with pytest.raises(UsageError, match=r"'loss' gives a tensor of shape \[\] for 64 samples.*reduction='none'"):
        on_ranks(1, lambda model, comm: evaluate(model, some_digits(100), comm, batch_size=64, metrics=metrics))


@pytest.mark.parametrize("fails", [False, True])
def test_each_part_of_the_model_is_in_the_mode_it_was_in(fails: bool) -> None:
    def metric(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ZeroDivisionError
        return output.sum(dim=1)

    def call(model: nn.Module, comm: Communicator) -> list[bool]:
        model.train()
        model.features[1].eval()  # frozen, as when fine-tuning
        before = [module.training for module in model.modules()]
        try:
            evaluate(model, some_digits(9), comm, batch_size=2, metrics={"sum": metric})
        except ZeroDivisionError:
            assert fails
        return [module.training for module in model.modules()] == before

    assert on_ranks(2, call) == [True, True]


def test_an_empty_dataset_and_an_impossible_batch_size_are_refused_on_all_ranks() -> None:
    def call(model: nn.Module, comm: Communicator) -> None:
        empty = ImageDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
        for run in (lambda **of: evaluate(**of, metrics=METRICS), predict):
            with pytest.raises(UsageError, match="the dataset to evaluate on is empty"):
                run(model=model, dataset=empty, comm=comm, batch_size=2)
            with pytest.raises(UsageError, match="batch_size is 0, but must be at least 1"):
                run(model=model, dataset=some_digits(9), comm=comm, batch_size=0)

    on_ranks(2, call)


# -- predict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("length", "batch_size"), AWKWARD)
def test_predictions_are_in_the_datasets_order_on_every_rank(size: int, length: int, batch_size: int) -> None:
    dataset = some_digits(length)

    def plainly(model: nn.Module, comm: Communicator) -> Tensor:
        model.eval()
        with torch.no_grad():
            return torch.cat([model(images) for images in dataset.images.split(batch_size)])

    (expected,) = on_ranks(1, plainly)
    found = on_ranks(size, lambda model, comm: predict(model, dataset, comm, batch_size=batch_size))
    assert all(torch.equal(each, expected) for each in found)


def test_predictions_keep_their_dtype_also_where_a_rank_has_none() -> None:
    dataset = ImageDataset(some_digits(5).images.double(), some_digits(5).labels)

    def call(model: nn.Module, comm: Communicator) -> Tensor:
        return predict(build(lambda: perceptron(64, 3)).double(), dataset, comm, batch_size=2)

    for found in on_ranks(4, call):
        assert found.dtype == torch.float64
        assert found.shape == (5, 3)
        assert not found.requires_grad


# -- gather_by_sample ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_values_dealt_in_any_order_come_back_in_order(size: int) -> None:
    order = torch.randperm(23, generator=torch.Generator().manual_seed(0))

    def body(comm: Communicator) -> Tensor:
        mine = order[comm.rank :: comm.size]
        return gather_by_sample(comm, mine, torch.stack([mine * 10, -mine], dim=1))

    expected = torch.stack([torch.arange(23) * 10, -torch.arange(23)], dim=1)
    assert all(torch.equal(each, expected) for each in run_on_ranks(size, body))


MISTAKES = {
    "a sample twice": ([[0, 1], [1, 2]], [2, 2], "each sample from 0 on exactly once"),
    "a sample twice on one rank": ([[0, 1, 1], [2]], [3, 1], "each sample from 0 on exactly once"),
    "a sample left out": ([[0, 1], [3, 4]], [2, 2], "each sample from 0 on exactly once"),
    "the first left out": ([[1], [2]], [1, 1], "each sample from 0 on exactly once"),
    "a value too few": ([[0, 1], [2]], [1, 1], "rank 0 gives 2 sample numbers but 1 values"),
    "a value too many": ([[0], [1]], [1, 2], "rank 1 gives 1 sample numbers but 2 values"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_it_is_an_error_on_all_ranks_to_give(kind: str) -> None:
    ids, lengths, reason = MISTAKES[kind]

    def body(comm: Communicator) -> bool:
        with pytest.raises(UsageError, match=reason):
            gather_by_sample(comm, torch.tensor(ids[comm.rank]), torch.zeros(lengths[comm.rank], 4))
        return True

    assert run_on_ranks(2, body) == [True, True]


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_evaluation_that_pads_so_that_all_ranks_have_equally_many_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = evaluation._own_batches

    def padded(model: nn.Module, dataset: Any, comm: Communicator, batch_size: int) -> Iterator[Any]:
        batches = list(honest(model, dataset, comm, batch_size))
        return iter(batches + batches[-1:] * (comm.rank == comm.size - 1))

    monkeypatch.setattr(evaluation, "_own_batches", padded)
    with pytest.raises(AssertionError):
        check_equal_to_a_plain_loop(3, 359, 64)


def test_red_twin_sums_in_fp32_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_in_order_of_batches", lambda rows: torch.cat(rows).float())
    with pytest.raises(AssertionError):
        check_same_bits_on_any_number_of_ranks(1797, 7)


def test_red_twin_each_ranks_mean_counts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def means(rows: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([own.sum(dim=0) / own[:, -1].sum() for own in rows])

    monkeypatch.setattr(evaluation, "_in_order_of_batches", means)
    with pytest.raises(AssertionError):
        check_equal_to_a_plain_loop(2, 359, 64)


def test_red_twin_evaluation_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "eval", lambda self: self)
    trained = evaluated(1, 359, 64)
    monkeypatch.undo()
    assert trained != evaluated(1, 359, 64)
