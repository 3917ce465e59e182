"""Communicators that add within nodes and then between them keep the contract, on one node and on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from contract import reductions
from contract.algorithm_contract import AlgorithmContract
from contract.communicator_contract import CommunicatorContract
from contract.values import FLOATS, for_each_dtype
from renkei.testing import run_on_ranks

NAMES = [
    f"{algorithm}/{backends}"
    for algorithm in ("hierarchical", "two_dimensional", "staged")
    for backends in ("shared_memory+gloo", "gloo+gloo")
]
# By rank, its node: even, uneven, scattered, alone.
NODES = [["a", "b"], ["a", "a", "b"], ["a", "b", "a"], ["a", "a", "b", "b"], ["b", "a", "a", "a"], ["a", "b", "c", "a"]]


class TestHierarchical(CommunicatorContract):
    """The whole of it at two sizes: what doesn't depend on how sums are made is that of flat."""

    name = "hierarchical/shared_memory+gloo"
    sizes = (2, 3)


class TestTwoDimensional(AlgorithmContract):
    name = "two_dimensional/shared_memory+gloo"


class TestStaged(AlgorithmContract):
    name = "staged/gloo+gloo"
    sizes = (2, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", NODES, ids="".join)
def test_sums_over_several_nodes(name: str, nodes: Sequence[str]) -> None:
    check = reductions.check_start_sum
    run_on_ranks(len(nodes), for_each_dtype, check, FLOATS, communicator=name, nodes=nodes)


@pytest.mark.parametrize("name", [NAMES[0], NAMES[3], NAMES[4]])
@pytest.mark.parametrize("nodes", NODES, ids="".join)
def test_coded_sums_over_several_nodes(name: str, nodes: Sequence[str]) -> None:
    run_on_ranks(len(nodes), reductions.check_coded_sum, communicator=name, nodes=nodes)


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_16_bits_are_rounded_once_in_each_level(name: str) -> None:
    """Each node's sum would lose all of its small addends if it was added in 16 bits."""

    def check(comm: Any) -> None:
        mine = 1.0 if comm.rank in (0, 3) else 2.0**-9  # three of which are more than half of what 1.0 can be told by
        for dtype in (torch.bfloat16, torch.float16):
            buffer = comm.allocate(1009, dtype, comm.device).fill_(mine)
            comm.start_sum(buffer, [buffer]).wait()
            within = torch.tensor(1.0 + 2 * 2.0**-9, dtype=torch.float64).to(dtype).double()
            assert buffer.double().eq((2 * within).to(dtype).double()).all(), dtype

    run_on_ranks(6, check, communicator=name, nodes=["a", "a", "a", "b", "b", "b"])
