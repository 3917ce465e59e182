"""Which algorithm over which backends: what names mean, and what suits which places and devices."""

from __future__ import annotations

import pytest
import torch

from renkei.communicators.choice import check_virtual_ranks, choose
from renkei.communicators.factory import COMMUNICATORS
from renkei.communicators.requested import ALGORITHMS, CHAINERMN, read_name
from renkei.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

# The name asked for, by rank the node, and what it becomes on CPUs and on GPUs.
CHOICES = [
    ("auto", "a", "flat/shared_memory", "flat/nccl"),
    ("auto", "aaa", "flat/shared_memory", "flat/nccl"),
    ("auto", "abc", "flat/gloo", "flat/nccl"),
    ("auto", "aab", "two_dimensional/shared_memory+gloo", "flat/nccl"),
    ("auto/gloo+gloo", "aa", "two_dimensional/gloo+gloo", "two_dimensional/gloo+gloo"),
    ("flat", "aa", "flat/shared_memory", "flat/nccl"),
    ("flat", "ab", "flat/gloo", "flat/nccl"),
    ("naive/gloo", "aa", "naive/gloo", "naive/gloo"),
    ("hierarchical", "aa", "hierarchical/shared_memory+gloo", "hierarchical/nccl+nccl"),
    ("hierarchical/mpi", "aab", "hierarchical/mpi+mpi", "hierarchical/mpi+mpi"),
    ("staged/shared_memory+mpi", "ab", "staged/shared_memory+mpi", "staged/shared_memory+mpi"),
    ("two_dimensional", "aab", "two_dimensional/shared_memory+gloo", "two_dimensional/nccl+nccl"),
    ("single_node", "aa", "single_node/shared_memory", "single_node/nccl"),
    ("non_cuda_aware", "aab", "staged/shared_memory+gloo", "staged/nccl+nccl"),
    ("dummy", "aa", "null/shared_memory", "null/nccl"),
    ("pure_nccl", "aab", "flat/nccl", "flat/nccl"),
]


@pytest.mark.parametrize(("name", "nodes", "on_cpus", "on_gpus"), CHOICES)
def test_choices(name: str, nodes: str, on_cpus: str, on_gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert str(choose(read_name(name), nodes, CPU)) == on_cpus
    assert str(choose(read_name(name), nodes, GPU)) == on_gpus


def test_a_backend_alone_goes_with_flat() -> None:
    assert str(choose(read_name("auto", "gloo"), "aab", CPU)) == "flat/gloo"


def test_without_shared_memory_gloo_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.communicators.choice.has_shared_memory", lambda: False)
    assert [str(choose(read_name("auto"), nodes, CPU)) for nodes in ("aa", "aab")] == ["flat/gloo", "flat/gloo"]


def test_every_algorithm_has_a_name_and_every_name_an_algorithm() -> None:
    assert set(COMMUNICATORS) == set(ALGORITHMS)
    chainermn = {
        "pure_nccl",
        "naive",
        "flat",
        "hierarchical",
        "two_dimensional",
        "single_node",
        "non_cuda_aware",
        "dummy",
    }
    assert chainermn <= {*ALGORITHMS, *CHAINERMN}
    for name in chainermn:
        assert read_name(name).algorithm in COMMUNICATORS


@pytest.mark.parametrize(
    ("virtual_ranks", "num_ranks"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3), (12, 3), (5, 5), (1, 1)]
)
def test_virtual_ranks_that_fit(virtual_ranks: int, num_ranks: int) -> None:
    check_virtual_ranks(virtual_ranks, num_ranks, "flat")


@pytest.mark.parametrize(("virtual_ranks", "num_ranks"), [(8, 3), (6, 2), (12, 4), (4, 8), (0, 2), (-2, 2)])
def test_virtual_ranks_that_do_not(virtual_ranks: int, num_ranks: int) -> None:
    with pytest.raises(UsageError, match=f"must be the number of ranks, {num_ranks}, times a power of two"):
        check_virtual_ranks(virtual_ranks, num_ranks, "flat")


@pytest.mark.parametrize("algorithm", ["hierarchical", "two_dimensional", "staged"])
def test_virtual_ranks_want_one_level(algorithm: str) -> None:
    check_virtual_ranks(None, 2, algorithm)
    with pytest.raises(UsageError, match="use 'flat'"):
        check_virtual_ranks(4, 2, algorithm)
