"""Checks of what moves tensors: broadcast, broadcast_into, all_gather, gather, scatter, all_to_all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from contract.values import DTYPES, LAYOUTS, SHAPES, Unchanged, assert_same, numbers, shapes_for
from renkei.communicators.communicator import Communicator

Make = Callable[[int], Tensor]


def check_every_movement(comm: Communicator, make: Make, roots: Iterable[int] | None = None) -> None:
    """`make(rank)` is what that rank brings; every operation is tried, with every root."""
    mine, everyone = make(comm.rank), [make(rank).detach() for rank in range(comm.size)]
    with Unchanged(mine, *everyone):
        for root in range(comm.size) if roots is None else roots:
            _check_rooted(comm, mine, everyone, root)
        _assert_all_same(comm.all_gather(mine), everyone)
        _assert_all_same(comm.all_to_all([mine] * comm.size), everyone)


def _check_rooted(comm: Communicator, mine: Tensor, everyone: list[Tensor], root: int) -> None:
    is_root = comm.rank == root
    assert_same(comm.broadcast(mine, root), everyone[root])  # what the others pass is not looked at
    gathered = comm.gather(mine, root)
    assert (gathered is None) == (not is_root)
    if gathered is not None:
        _assert_all_same(gathered, everyone)
    assert_same(comm.scatter(everyone if is_root else None, root), everyone[comm.rank])


def _assert_all_same(actual: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    assert isinstance(actual, tuple)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def check_dtype(comm: Communicator, dtype: torch.dtype) -> None:
    """Every dtype moves, whatever the shape."""
    root = DTYPES.index(dtype) % comm.size
    for shape in shapes_for(dtype, comm.size)[:2]:
        check_every_movement(comm, lambda rank, shape=shape: numbers(rank, shape, dtype), [root])


def check_layouts(comm: Communicator) -> None:
    """So does what isn't contiguous, belongs to a graph, or is conjugated by a flag."""
    for at, make in enumerate(LAYOUTS.values()):
        check_every_movement(comm, make, roots=[at % comm.size])


def check_shapes_by_rank(comm: Communicator) -> None:
    """Ranks may bring different shapes, also of different dimensions, and nothing at all."""
    assert_same(comm.broadcast(numbers(0) if comm.rank == 0 else None), numbers(0))
    check_every_movement(comm, lambda rank: numbers(rank, (rank, 3)))
    check_every_movement(comm, lambda rank: numbers(rank, [(), (5,), (2, 0), (1, 2, 3)][rank], torch.int64))
    check_every_movement(comm, lambda rank: numbers(rank, (1009 if rank == comm.size - 1 else 0,), torch.bool))


def check_all_to_all_shapes_by_pair(comm: Communicator) -> None:
    """Each pair may have its own shape, an empty one too."""

    def make(source: int, dest: int) -> Tensor:
        return numbers(10 * source + dest, (source * dest, 3) if dest % 2 else (source + dest,), torch.float16)

    mine = [make(comm.rank, dest) for dest in range(comm.size)]
    with Unchanged(*mine):
        received = comm.all_to_all(mine)
    _assert_all_same(received, [make(source, comm.rank) for source in range(comm.size)])


def check_broadcast_into(comm: Communicator) -> None:
    """Tensors of every dtype, shape and layout get the root's values in one call, and keep their own memory."""

    def make(rank: int) -> list[Tensor]:
        mixed = [numbers(rank, SHAPES[at % len(SHAPES)], dtype) for at, dtype in enumerate(DTYPES)]
        layouts = [make(rank) for name, make in LAYOUTS.items() if name not in ("expanded", "result of a graph")]
        return [*mixed, *layouts]

    for root in range(comm.size):
        tensors = make(comm.rank)
        places = [(tensor.data_ptr(), tensor.stride(), tensor.requires_grad) for tensor in tensors]
        comm.broadcast_into(tensors, root)
        for tensor, place, expected in zip(tensors, places, make(root), strict=True):
            assert (tensor.data_ptr(), tensor.stride(), tensor.requires_grad) == place
            assert_same(tensor.detach(), expected.detach())
    comm.broadcast_into([])


def check_results_are_own(comm: Communicator) -> None:
    """Results share no memory with arguments, at any number of ranks: writing to them changes nothing else."""
    mine = numbers(comm.rank)
    results = [comm.all_reduce(mine), comm.broadcast(mine), *comm.all_gather(mine), comm.scatter([mine] * comm.size)]
    results += [
        *comm.all_to_all([mine] * comm.size),
        comm.reduce_scatter([mine] * comm.size),
        *(comm.gather(mine) or ()),
    ]
    with Unchanged(mine):
        for result in results:
            result.fill_(-1)
