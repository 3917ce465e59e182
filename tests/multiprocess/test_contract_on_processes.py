"""The communicators keep the contract on real processes of one host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from contract.served_contract import ServedAlgorithm, ServedContract
from contract.served_ranks import ServedRanks, renkei_launch, serve

pytestmark = pytest.mark.timeout(150)  # the first test waits for ten processes that import torch


@pytest.fixture(scope="module")
def served() -> Iterator[Mapping[int, ServedRanks]]:
    with serve(ServedContract.sizes, renkei_launch) as by_size:
        yield by_size


@pytest.mark.parametrize("spec", ["flat/gloo"])
class TestContract(ServedContract):
    """On threads it is tested at every size."""

    sizes = (3,)


@pytest.mark.parametrize("spec", ["flat/shared_memory"])
class TestContractOnOneNode(ServedContract):
    """On threads it is tested at every size."""

    sizes, num_nodes = (4,), 1


@pytest.mark.parametrize(
    "spec",
    [
        "hierarchical/shared_memory+gloo",
        "naive/gloo",
        "staged/shared_memory+gloo",
        "two_dimensional/shared_memory+gloo",
    ],
)
class TestAlgorithm(ServedAlgorithm):
    """On threads it is tested at every size."""

    sizes = (4,)


@pytest.mark.parametrize("spec", ["naive/shared_memory", "single_node/shared_memory"])
class TestAlgorithmOnOneNode(ServedAlgorithm):
    sizes, num_nodes = (4,), 1
