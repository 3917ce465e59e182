"""Communicators over shared memory keep the contract."""

import pytest

from contract.algorithm_contract import AlgorithmContract
from contract.communicator_contract import CommunicatorContract
from renkei.errors import UsageError
from renkei.testing import run_on_ranks


class TestFlatOverSharedMemory(CommunicatorContract):
    name = "flat/shared_memory"
    num_nodes = 1


class TestNaiveOverSharedMemory(AlgorithmContract):
    name = "naive/shared_memory"
    sizes = (2, 3)
    num_nodes = 1


class TestSingleNode(AlgorithmContract):
    name = "single_node/shared_memory"
    sizes = (2, 3)
    num_nodes = 1


@pytest.mark.parametrize("name", ["flat/shared_memory", "single_node", "single_node/gloo"])
def test_several_nodes_are_refused_on_all_ranks(name: str) -> None:
    with pytest.raises(UsageError, match=r"one node, but there are 2 nodes; use"):
        run_on_ranks(3, lambda comm: None, communicator=name, nodes=["a", "a", "b"])
