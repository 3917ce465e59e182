"""What ranks bring and what must come of it: each rank writes its rank, so that expected values are closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from renkei.communicators.communicator import Communicator
from renkei.communicators.headers import DTYPES

SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 2), (7,), (3, 5, 1), (2, 3, 1, 5), (1009,)]


def shapes_for(dtype: torch.dtype, size: int) -> list[tuple[int, ...]]:
    """All shapes, beginning with another one for each dtype and number of ranks: so all pairs of them are tried."""
    shift = (DTYPES.index(dtype) + 3 * size) % len(SHAPES)
    return SHAPES[shift:] + SHAPES[:shift]


def for_each_dtype(comm: Communicator, check: Callable[..., None], dtypes: Sequence[torch.dtype]) -> None:
    """Run a check for each dtype, over one communicator; a failure says for which."""
    for dtype in dtypes:
        try:
            check(comm, dtype)
        except Exception as error:
            error.add_note(f"rank {comm.rank} of {comm.size} with {dtype}")
            raise


FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize > 1]
COMPLEX = [dtype for dtype in DTYPES if dtype.is_complex]
INTEGERS = [dtype for dtype in DTYPES if not dtype.is_floating_point and not dtype.is_complex]
SUMMED = [*FLOATS, *COMPLEX, *INTEGERS]
WITHOUT_SUM = [torch.float8_e4m3fn, torch.float8_e5m2]


def numbers(rank: int, shape: Sequence[int] = (37,), dtype: torch.dtype = torch.float32) -> Tensor:
    """Element j is j % 7 + rank, small enough for every dtype; complex ones have the negative as imaginary part."""
    real = torch.arange(math.prod(shape), dtype=torch.float64).reshape(tuple(shape)) % 7 + rank
    if dtype.is_complex:
        return torch.complex(real, -real).to(dtype)
    return (real % 2 == 1) if dtype == torch.bool else real.to(dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Dtype, shape and every bit are equal, and nothing hangs on the result."""
    assert isinstance(actual, Tensor)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert not actual.requires_grad
    assert torch.equal(_bits(actual), _bits(expected)), f"{actual} instead of {expected}"


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _strided(rank: int) -> Tensor:
    return numbers(rank, (6, 10))[::2, ::3]


def _non_leaf(rank: int) -> Tensor:
    return numbers(rank).requires_grad_() * 2


# Tensors that are not simply elements in a row, by rank.
LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda rank: numbers(rank, (5, 7)).t(),
    "neither rows nor columns": _strided,
    "reversed strides": lambda rank: numbers(rank, (3, 5, 7)).permute(2, 0, 1)[:, 1:],
    "channels_last": lambda rank: numbers(rank, (2, 3, 5, 7)).contiguous(memory_format=torch.channels_last),
    "expanded": lambda rank: numbers(rank, (1, 5)).expand(3, 5),
    "part of another": lambda rank: numbers(rank, (101,), torch.int16)[3:50],
    "requires_grad": lambda rank: numbers(rank).requires_grad_(),
    "result of a graph": _non_leaf,
    "conjugate": lambda rank: numbers(rank, (11,), torch.complex64).conj(),
    "negative view": lambda rank: numbers(rank, (11,), torch.complex64).conj().imag,
    "imaginary part": lambda rank: numbers(rank, (11,), torch.complex128).imag,
    "parameter": lambda rank: torch.nn.Parameter(numbers(rank, (3, 5))),
}


class Unchanged:
    """Raises on leaving if a collective has changed its arguments."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._before = [(_bits(t).clone(), t.stride(), t.requires_grad, t.grad_fn, t._version) for t in tensors]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            for tensor, (bits, *rest) in zip(self._tensors, self._before, strict=True):
                assert torch.equal(_bits(tensor), bits)
                assert [tensor.stride(), tensor.requires_grad, tensor.grad_fn, tensor._version] == rest
