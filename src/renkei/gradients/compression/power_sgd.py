"""PowerSGD: of each large matrix two thin factors travel, from one power iteration a step.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD" (NeurIPS 2019), algorithms 1 and 2. M being a rank's gradient and
what it owes, P is the sum of all M Q, made orthonormal; then Q is the sum of all M' P; and P Q' stands for the sum of
all M. A rank owes what P leaves of its own M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from renkei.gradients.compression.tentative import Tentative
from renkei.gradients.compression.wire import Add, Carrier, Work, give_along

_WORTH_IT = 2  # times as many elements as its factors a matrix must have

Matrix = tuple[int, int]


class PowerSgdWire:
    """Carries one bucket. Vectors, and matrices that are hardly larger than their factors, go as they are.

    Every rank computes the same from the same sums, bit by bit only on processors of one kind.

    Args:
        shapes: of the gradients; what has more than two dimensions is a matrix with the first one as its rows.
        rank: how many columns factors have.
        seed: of the first factors; the same on all ranks.

    Attributes:
        owed: see `Wire`.
        factors: every matrix's last Q, where its next power iteration begins.
        factor_sizes: by gradient, how many numbers its Q has.
    """

    def __init__(self, shapes: Sequence[torch.Size], *, rank: int, seed: int) -> None:
        self.matrices = [_as_matrix(shape, rank) for shape in shapes]
        self.rank, self._seed = rank, seed
        self.factor_sizes: Sequence[int] = [matrix[1] * rank if matrix else 0 for matrix in self.matrices]
        self.owed: Tentative | None = Tentative()
        self.factors: Tentative | None = Tentative()

    def start_sum(self, carrier: Carrier, buffer: Tensor, pieces: Sequence[Tensor]) -> Work:
        """Begin both sums, one after the other."""
        assert self.owed is not None
        assert self.factors is not None
        if carrier.num_addends == 1 or not any(self.matrices):
            return carrier.start_sum(buffer, pieces)
        owed = self.owed.begin(lambda: torch.zeros_like(buffer))
        factors = self.factors.begin(lambda: self._first_factors(buffer))
        return carrier.start_sums(lambda add: self._add(add, buffer, pieces, owed, factors), buffer.device)

    def _first_factors(self, like: Tensor) -> Tensor:
        random = torch.Generator().manual_seed(self._seed)
        return torch.randn(sum(self.factor_sizes), generator=random, device="cpu").to(like.device)

    def _add(self, add: Add, buffer: Tensor, pieces: Sequence[Tensor], owed: Tensor, factors: Tensor) -> None:
        give_along(owed, buffer)
        plain = [piece for piece, shape in zip(pieces, self.matrices, strict=True) if shape is None]
        matrices, debts = [], []
        for piece, shape in zip(pieces, self.matrices, strict=True):
            if shape is not None:
                begin = piece.storage_offset() - buffer.storage_offset()
                matrices.append(piece.view(shape))
                debts.append(owed[begin : begin + piece.numel()].view(shape))
        qs = _cut(factors, [(matrix.shape[1], self.rank) for matrix in matrices])

        first = [*plain, *(matrix @ _orthonormal(q) for matrix, q in zip(matrices, qs, strict=True))]
        message = torch.cat([each.reshape(-1) for each in first])
        add(message)
        sums = message.split([each.numel() for each in first])
        for piece, total in zip(plain, sums, strict=False):
            piece.copy_(total)
        ps = [_orthonormal(total.view(-1, self.rank)) for total in sums[len(plain) :]]

        for matrix, p, q, debt in zip(matrices, ps, qs, debts, strict=True):
            torch.matmul(matrix.T, p, out=q)
            torch.sub(matrix, p @ q.T, out=debt)
        add(factors)
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            torch.matmul(p, q.T, out=matrix)


def _as_matrix(shape: torch.Size, rank: int) -> Matrix | None:
    """Rows and columns; None if its factors wouldn't have much fewer elements."""
    if len(shape) < 2 or not shape.numel():
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if _WORTH_IT * (rows + columns) * rank <= rows * columns else None


def _cut(flat: Tensor, shapes: Sequence[Matrix]) -> list[Tensor]:
    parts = flat.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span what the matrix's do, also where some are zero; what isn't finite as it is."""
    return torch.linalg.qr(matrix).Q if bool(matrix.isfinite().all()) else matrix
