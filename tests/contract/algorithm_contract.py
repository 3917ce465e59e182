"""What depends on how tensors are added, as a class to inherit from: sums, and what is made for them and let go of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from contract import membership, reductions
from contract.values import FLOATS, for_each_dtype
from renkei.testing import run_on_ranks

HANG = 15.0  # seconds; generous, for what takes milliseconds

TestMethod = TypeVar("TestMethod", bound=Callable[..., None])


def at_sizes(*sizes: int) -> Callable[[TestMethod], TestMethod]:
    """What a test has to say it says at these sizes; where ranks come in none of them, at another one."""

    def mark(test: TestMethod) -> TestMethod:
        test.__dict__["sizes"] = sizes
        return test

    return mark


def several_ranks(test: TestMethod) -> TestMethod:
    """There is nothing to test at one rank."""
    return at_sizes(2, 3, 4, 5, 6, 7)(test)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
class AlgorithmContract:
    """Inherit, set `name`, and override `run` where ranks can't be threads.

    Attributes:
        name: of the communicator.
        sizes: how many ranks there may be.
        places: by rank, the nodes that ranks are on, in the tests that care.
        num_nodes: how many nodes there may be.
    """

    name: ClassVar[str]
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    places: ClassVar[Sequence[Sequence[str]]] = membership.NODES
    num_nodes: ClassVar[int] = 4

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test is run at each size that it has something to say of."""
        if "size" in metafunc.fixturenames:
            wanted = getattr(metafunc.function, "sizes", self.sizes)
            sizes = [size for size in self.sizes if size in wanted]
            metafunc.parametrize("size", sizes or self.sizes[-1:])
        if "nodes" in metafunc.fixturenames:
            fitting = [each for each in self.places if len(each) in self.sizes and len(set(each)) <= self.num_nodes]
            metafunc.parametrize("nodes", fitting, ids="".join)

    def run(self, size: int, check: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call ``check(comm, *args)`` on `size` ranks; returns results by rank."""
        return run_on_ranks(size, check, *args, communicator=self.name, **options)

    def test_start_sum(self, size: int) -> None:
        self.run(size, for_each_dtype, reductions.check_start_sum, FLOATS)

    @at_sizes(1, 3)
    def test_coded_sum(self, size: int) -> None:
        self.run(size, reductions.check_coded_sum)

    def test_start_sum_wherever_ranks_are(self, nodes: Sequence[str]) -> None:
        dtypes = [torch.float32, torch.bfloat16]
        self.run(len(nodes), for_each_dtype, reductions.check_start_sum, dtypes, nodes=nodes)

    def test_16_bits_are_added_in_32(self, size: int) -> None:
        self.run(size, reductions.check_16_bits_are_added_in_32)

    def test_topology_and_descendants(self, nodes: Sequence[str]) -> None:
        self.run(len(nodes), membership.check_topology, nodes, nodes=nodes)
        self.run(len(nodes), membership.check_descendants_are_alike, nodes=nodes)

    @pytest.mark.parametrize(
        "check",
        [
            membership.check_split,
            membership.check_duplicate,
            membership.check_sums_of_descendants_do_not_meet,
            membership.check_closed,
            membership.check_dropped_descendants_are_let_go,
            membership.check_copies,
        ],
    )
    def test_membership(self, size: int, check: Callable[..., Any]) -> None:
        self.run(size, check)

    @several_ranks
    def test_a_sum_with_a_rank_that_has_ended_is_an_error(self, size: int) -> None:
        self.run(size, membership.check_sum_of_lost_peer, timeout=2 * HANG)
