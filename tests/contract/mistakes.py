"""Checks of wrong calls: an error of the same kind on all ranks, soon, after which the communicator still works."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from contract.values import assert_same, numbers
from renkei.communicators.communicator import Communicator
from renkei.errors import RenkeiError

Call = Callable[[Communicator], object]
SOON = 1.0  # seconds; a wait for another rank would last until the communicator's timeout, which is longer


def error_of(comm: Communicator, call: Call) -> tuple[str, str]:
    """Kind and text of the error that a call raises at once."""
    begin = time.monotonic()
    try:
        call(comm)
    except RenkeiError as error:
        assert time.monotonic() - begin < SOON
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def check_refused(comm: Communicator, calls: Mapping[str, Call]) -> dict[str, tuple[str, str]]:
    """Each call raises, and what is called next is as if it had not been; returns kinds and texts."""
    errors = {}
    for name, call in calls.items():
        errors[name] = error_of(comm, call)
        assert_same(comm.all_reduce(torch.tensor([comm.rank])), torch.tensor([comm.size * (comm.size - 1) // 2]))
    return errors


def assert_one_error(by_rank: list[dict[str, tuple[str, str]]]) -> dict[str, tuple[str, str]]:
    """Each call raised the same error on all ranks; returns kinds and texts."""
    for errors in by_rank:
        for name, error in errors.items():
            assert error == by_rank[0][name], name
    return by_rank[0]


def only_last_is_wrong(calls: Mapping[str, Call]) -> dict[str, Call]:
    """The calls on the last rank, calls that would be right on the others."""
    return {name: _last(lambda comm: comm.all_reduce(torch.zeros(5)), call) for name, call in calls.items()}


def assert_tells_difference(text: str) -> None:
    """What rank 0 is said to call differs from what the other rank is said to."""
    first, second, *_ = text.split("; ")
    assert first.partition(" calls ")[2] != second.partition(" calls ")[2], text


def _each(comm: Communicator) -> list[torch.Tensor]:
    return [numbers(comm.rank)] * comm.size


# Calls that are wrong on whichever rank makes them. ROOTED take a root, which is wrong there.
ROOTED: dict[str, Callable[[Communicator, int], object]] = {
    "broadcast": lambda comm, root: comm.broadcast(numbers(0), root),
    "broadcast_into": lambda comm, root: comm.broadcast_into([numbers(0)], root),
    "gather": lambda comm, root: comm.gather(numbers(0), root),
    "scatter": lambda comm, root: comm.scatter(_each(comm), root),
    "broadcast_object": lambda comm, root: comm.broadcast_object("object", root),
    "gather_object": lambda comm, root: comm.gather_object("object", root),
    "scatter_object": lambda comm, root: comm.scatter_object(["object"] * comm.size, root),
}
WRONG: dict[str, Call] = {
    **{f"{name}, root too high": lambda comm, call=call: call(comm, comm.size) for name, call in ROOTED.items()},
    **{f"{name}, root negative": lambda comm, call=call: call(comm, -1) for name, call in ROOTED.items()},
    "reduce_scatter, too few": lambda comm: comm.reduce_scatter(_each(comm)[1:]),
    "reduce_scatter, too many": lambda comm: comm.reduce_scatter([*_each(comm), numbers(0)]),
    "all_to_all, too few": lambda comm: comm.all_to_all(_each(comm)[1:]),
    "all_to_all, too many": lambda comm: comm.all_to_all([*_each(comm), numbers(0)]),
    "reduce_scatter, median": lambda comm: comm.reduce_scatter(_each(comm), "median"),
    "reduce_scatter, max": lambda comm: comm.reduce_scatter(_each(comm), "max"),
    "all_reduce, median": lambda comm: comm.all_reduce(numbers(0), "median"),
    "all_reduce, mean of integers": lambda comm: comm.all_reduce(numbers(0, dtype=torch.int64), "mean"),
    "all_reduce, mean of bool": lambda comm: comm.all_reduce(numbers(0, dtype=torch.bool), "mean"),
    "all_reduce, max of complex": lambda comm: comm.all_reduce(numbers(0, dtype=torch.complex64), "max"),
    "all_reduce, product of complex": lambda comm: comm.all_reduce(numbers(0, dtype=torch.complex128), "product"),
    "all_reduce, max of uint64": lambda comm: comm.all_reduce(numbers(0, dtype=torch.uint64), "max"),
    "all_reduce, sum of float8": lambda comm: comm.all_reduce(numbers(0, dtype=torch.float8_e5m2)),
    "reduce_scatter, sum of float8": lambda comm: comm.reduce_scatter(
        [numbers(0, dtype=torch.float8_e4m3fn)] * comm.size
    ),
    "all_reduce, on no device": lambda comm: comm.all_reduce(numbers(0).to("meta")),
    "broadcast_into, one on no device": lambda comm: comm.broadcast_into([numbers(0), numbers(0).to("meta")]),
    "all_gather, unknown dtype": lambda comm: comm.all_gather(torch.zeros(3, dtype=torch.float8_e8m0fnu)),
    "broadcast_object, not picklable": lambda comm: comm.broadcast_object(lambda: None, comm.size - 1),
    "all_gather_object, not picklable": lambda comm: comm.all_gather_object(lambda: None),
    "gather_object, not picklable": lambda comm: comm.gather_object(lambda: None),
}
# Wrong on the root alone, or only where there are several ranks or tensors.
WRONG_ON_ROOT: dict[str, Call] = {
    "broadcast, root without tensor": lambda comm: comm.broadcast(None),
    "scatter, root without tensors": lambda comm: comm.scatter(None),
    "scatter, too few": lambda comm: comm.scatter(_each(comm)[1:] if comm.rank == 0 else None),
    "scatter_object, root without objects": lambda comm: comm.scatter_object(None),
    "scatter_object, too many": lambda comm: comm.scatter_object(["object"] * (comm.size + 1)),
}
MIXED: dict[str, Call] = {
    "reduce_scatter": lambda comm: comm.reduce_scatter([*_each(comm)[1:], numbers(0, dtype=torch.int8)]),
    "all_to_all": lambda comm: comm.all_to_all([*_each(comm)[1:], numbers(0, dtype=torch.int8)]),
    "scatter": lambda comm: comm.scatter([*_each(comm)[1:], numbers(0, dtype=torch.int8)]),
    "scatter_object, not picklable": lambda comm: comm.scatter_object([*range(comm.size - 1), lambda: None]),
}


def _odd(comm: Communicator) -> bool:
    """Whether this is the one rank that does otherwise."""
    return comm.rank == comm.size - 1


def _last(ordinary: Call, other: Call) -> Call:
    return lambda comm: other(comm) if _odd(comm) else ordinary(comm)


def _sum(*shape: int, dtype: torch.dtype = torch.float32, reduction: str = "sum") -> Call:
    return lambda comm: comm.all_reduce(torch.zeros(shape, dtype=dtype), reduction)


# Calls that are right in themselves and don't fit those of the other ranks.
MISMATCHED: dict[str, Call] = {
    "operation": _last(_sum(5), lambda comm: comm.all_gather(torch.zeros(5))),
    "tensor and object": _last(lambda comm: comm.all_gather(torch.zeros(5)), lambda comm: comm.all_gather_object(5)),
    "number of elements": _last(_sum(5), _sum(7)),
    "shape of as many elements": _last(_sum(3, 5), _sum(5, 3)),
    "number of dimensions": _last(_sum(15), _sum(3, 5)),
    "dimensions of length 1": _last(_sum(1), _sum()),
    "none and some": _last(_sum(5), _sum(0)),
    "dtype": _last(_sum(5), _sum(5, dtype=torch.float64)),
    "dtype of equal width": _last(_sum(5, dtype=torch.float16), _sum(5, dtype=torch.bfloat16)),
    "reduction": _last(_sum(5), _sum(5, reduction="max")),
    "root": _last(lambda comm: comm.broadcast(numbers(0), 0), lambda comm: comm.broadcast(numbers(0), 1)),
    "root of objects": _last(lambda comm: comm.gather_object(0, 0), lambda comm: comm.gather_object(0, 1)),
    "dtypes gathered": _last(
        lambda comm: comm.all_gather(torch.zeros(5)), lambda comm: comm.all_gather(torch.zeros(5, dtype=torch.int8))
    ),
    "dtypes of equal width gathered": _last(
        lambda comm: comm.all_gather(torch.zeros(5)), lambda comm: comm.all_gather(torch.zeros(5, dtype=torch.int32))
    ),
    "shapes scattered": _last(
        lambda comm: comm.reduce_scatter([torch.zeros(5)] * comm.size),
        lambda comm: comm.reduce_scatter([torch.zeros(5)] * (comm.size - 1) + [torch.zeros(7)]),
    ),
    "shapes broadcast into": _last(
        lambda comm: comm.broadcast_into([torch.zeros(3), torch.zeros(5)]),
        lambda comm: comm.broadcast_into([torch.zeros(5), torch.zeros(3)]),
    ),
    "number broadcast into": _last(
        lambda comm: comm.broadcast_into([torch.zeros(3), torch.zeros(5)]),
        lambda comm: comm.broadcast_into([torch.zeros(8)]),
    ),
    "dtype broadcast into": _last(
        lambda comm: comm.broadcast_into([torch.zeros(3), torch.zeros(5)]),
        lambda comm: comm.broadcast_into([torch.zeros(3), torch.zeros(5, dtype=torch.float64)]),
    ),
    "the last of many broadcast into": _last(
        lambda comm: comm.broadcast_into([torch.zeros(3)] * 101),
        lambda comm: comm.broadcast_into([torch.zeros(3)] * 100 + [torch.zeros(5)]),
    ),
    "a call skipped": _last(
        lambda comm: [comm.all_reduce(torch.zeros(5)), comm.broadcast_object()], lambda comm: comm.broadcast_object()
    ),
}
