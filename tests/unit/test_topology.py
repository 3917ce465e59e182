"""Where ranks stand, for any placement on nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renkei.topology import Topology

placements = st.lists(st.integers(0, 5), min_size=1, max_size=23)


def check_topologies(topologies: Sequence[Topology], nodes: Sequence[object]) -> None:
    """The numbers of all ranks fit their placement and one another."""
    order = list(dict.fromkeys(nodes))  # nodes by their lowest rank
    for rank, topology in enumerate(topologies):
        neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        assert (topology.rank, topology.size) == (rank, len(nodes))
        assert (topology.inter_rank, topology.inter_size) == (order.index(nodes[rank]), len(order))
        assert topology.intra_size == len(neighbours)
        assert neighbours[topology.intra_rank] == rank


def topologies_of(nodes: Sequence[object]) -> list[Topology]:
    return [Topology.from_nodes(rank, nodes) for rank in range(len(nodes))]


@given(placements)
def test_numbers_fit_any_placement(nodes: list[int]) -> None:
    check_topologies(topologies_of(nodes), nodes)


@given(placements)
def test_pairs_of_intra_and_inter_rank_are_unique_and_complete(nodes: list[int]) -> None:
    topologies = topologies_of(nodes)
    pairs = {(topology.inter_rank, topology.intra_rank) for topology in topologies}
    sizes = {topology.inter_rank: topology.intra_size for topology in topologies}
    assert pairs == {(node, place) for node, size in sizes.items() for place in range(size)}
    assert set(sizes) == set(range(topologies[0].inter_size))


@pytest.mark.parametrize(
    ("nodes", "inter", "intra"),
    [
        ("aabb", [0, 0, 1, 1], [0, 1, 0, 1]),
        ("abab", [0, 1, 0, 1], [0, 0, 1, 1]),
        ("baa", [0, 1, 1], [0, 0, 1]),
        ("a", [0], [0]),
    ],
)
def test_by_block_round_robin_and_uneven(nodes: str, inter: list[int], intra: list[int]) -> None:
    topologies = topologies_of(nodes)
    assert [topology.inter_rank for topology in topologies] == inter
    assert [topology.intra_rank for topology in topologies] == intra


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 4}, {"rank": -1}, {"intra_rank": 2}, {"inter_rank": 2}, {"size": 0}, {"inter_size": 0, "inter_rank": 0}],
)
def test_impossible_numbers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and below"):
        replace(Topology(3, 4, 1, 2, 1, 2), **wrong)


def test_it_can_not_be_changed() -> None:
    topology = Topology(0, 1, 0, 1, 0, 1)
    with pytest.raises(FrozenInstanceError):
        topology.rank = 1  # type: ignore[misc]
    assert topology == Topology.from_nodes(0, ["here"])
    assert len({topology, Topology.from_nodes(0, ["there"])}) == 1


DEFECTS: dict[str, Callable[[Topology], Topology]] = {
    "position + 1": lambda t: replace(t, rank=(t.rank + 1) % t.size),
    "intra_rank + 1": lambda t: replace(t, intra_rank=(t.intra_rank + 1) % t.intra_size),
    "nodes counted backwards": lambda t: replace(t, inter_rank=t.inter_size - 1 - t.inter_rank),
    "one node": lambda t: replace(t, inter_rank=0, inter_size=1),
    "intra_size is size": lambda t: replace(t, intra_size=t.size),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_red_twin_topology(defect: Callable[[Topology], Topology]) -> None:
    nodes = "abaab"
    with pytest.raises(AssertionError):
        check_topologies([defect(topology) for topology in topologies_of(nodes)], nodes)
