"""Pooled running statistics are those of all ranks' samples together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import build
from renkei.communicators.communicator import Communicator
from renkei.testing import run_on_ranks
from renkei.training.batch_norm_statistics import pool_batch_norm

Pool = Callable[[nn.Module, Communicator, int], None]
COUNTS = [(9,), (5, 5), (7, 1, 4), (3, 0, 1, 8), (0, 6)]
FEATURES = (3, 5)


def model() -> nn.Module:
    """Batch normalization of two widths, some of it inside other modules, and some without running statistics."""
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    return build(
        lambda: nn.ModuleList([nn.BatchNorm1d(FEATURES[0]), nn.Sequential(nn.BatchNorm2d(FEATURES[1])), untracked])
    )


def tracked(module: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d]:
    return [module[0], module[1][0]]  # type: ignore[index]


def samples(count: int, rank: int) -> list[Tensor]:
    """A rank's samples for each layer, in fp64; ranks differ in mean and spread."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (1 + rank) * torch.randn(count, width, generator=generator, dtype=torch.float64) + 3 * rank
        for width in FEATURES
    ]


def estimate(layer: nn.Module, values: Tensor) -> None:
    """Let a layer's running statistics be those of these samples, if there are any."""
    if len(values):
        layer.running_mean.copy_(values.mean(dim=0))
        layer.running_var.copy_(values.var(dim=0, correction=0))


def check_pooled(counts: Sequence[int], dtype: torch.dtype, tolerance: float, pool: Pool = pool_batch_norm) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        mine = model().to(dtype)
        for layer, values in zip(tracked(mine), samples(counts[comm.rank], comm.rank), strict=True):
            estimate(layer, values)
        pool(mine, comm, counts[comm.rank])
        return [statistic for layer in tracked(mine) for statistic in (layer.running_mean, layer.running_var)]

    everything = [torch.cat(of_layer) for of_layer in zip(*map(samples, counts, range(len(counts))), strict=True)]
    expected = [each for values in everything for each in (values.mean(dim=0), values.var(dim=0, correction=0))]
    by_rank = run_on_ranks(len(counts), body)
    for statistics in by_rank:
        for found, right, first in zip(statistics, expected, by_rank[0], strict=True):
            torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)
            assert torch.equal(found, first)
            assert found.dtype == dtype


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_mean_and_variance_are_those_of_all_samples(
    counts: Sequence[int], dtype: torch.dtype, tolerance: float
) -> None:
    check_pooled(counts, dtype, tolerance)


def test_pooling_again_changes_nothing() -> None:
    def body(comm: Communicator) -> None:
        mine = model().double()
        for layer, values in zip(tracked(mine), samples(4 + comm.rank, comm.rank), strict=True):
            estimate(layer, values)
        pool_batch_norm(mine, comm, 4 + comm.rank)
        before = [layer.running_var.clone() for layer in tracked(mine)]
        pool_batch_norm(mine, comm, 4 + comm.rank)
        for layer, once in zip(tracked(mine), before, strict=True):
            torch.testing.assert_close(layer.running_var, once, rtol=1e-12, atol=0)

    run_on_ranks(3, body)


def test_a_variance_is_never_negative() -> None:
    def body(comm: Communicator) -> None:
        mine = nn.BatchNorm1d(100)
        mine.running_mean.copy_(torch.linspace(1e6, 3e6, 100))
        mine.running_var.zero_()
        pool_batch_norm(mine, comm, 3 + comm.rank)
        assert mine.running_var.min() >= 0

    run_on_ranks(3, body)


def test_without_samples_statistics_stay_as_they_are() -> None:
    def body(comm: Communicator) -> None:
        mine = model()
        for layer in tracked(mine):
            layer.running_mean.fill_(comm.rank + 1)
        pool_batch_norm(mine, comm, 0)
        for layer in tracked(mine):
            assert layer.running_mean.unique().tolist() == [comm.rank + 1]
            assert layer.running_var.unique().tolist() == [1]

    run_on_ranks(3, body)


def test_without_batch_normalization_no_message_is_sent() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:  # nobody answers
            pool_batch_norm(nn.Linear(2, 2), comm, 5)
            pool_batch_norm(nn.BatchNorm1d(2, track_running_stats=False), comm, 5)

    run_on_ranks(2, body)


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_pooled_without_counts() -> None:
    with pytest.raises(AssertionError):
        check_pooled((7, 1, 4), torch.float64, 1e-12, lambda model, comm, count: pool_batch_norm(model, comm, 1))


def test_red_twin_the_mean_of_variances() -> None:
    def average(module: nn.Module, comm: Communicator, count: int) -> None:
        for layer in tracked(module):
            for statistic in (layer.running_mean, layer.running_var):
                statistic.copy_(comm.all_reduce(statistic * count) / comm.all_reduce(torch.tensor(float(count))))

    with pytest.raises(AssertionError):
        check_pooled((7, 1, 4), torch.float64, 1e-12, average)


def test_red_twin_not_pooled_at_all() -> None:
    with pytest.raises(AssertionError):
        check_pooled((7, 1, 4), torch.float64, 1e-12, lambda model, comm, count: None)
