"""What goes through the host's memory comes back whole, piece by piece. With a GPU, see tests/gpu."""

from __future__ import annotations

import pytest
import torch

from renkei.communicators.through_host import through_host


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 23])
def test_every_element_is_acted_on_once(numel: int, dtype: torch.dtype) -> None:
    tensor, seen = torch.arange(numel).to(dtype), []

    def act(piece: torch.Tensor) -> None:
        assert piece.numel() * piece.element_size() <= 8
        seen.extend(piece.tolist())
        piece.add_(1)

    through_host(tensor, act, piece=8)
    assert seen == list(range(numel))
    assert tensor.tolist() == list(range(1, numel + 1))


def test_an_element_larger_than_a_piece_is_a_piece() -> None:
    tensor, sizes = torch.zeros(3, dtype=torch.complex128), []
    through_host(tensor, lambda piece: sizes.append(piece.numel()), piece=1)
    assert sizes == [1, 1, 1]


def test_an_error_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        through_host(torch.zeros(3), lambda _: 1 / 0)
