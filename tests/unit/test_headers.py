"""The 32 bytes that ranks exchange before a collective."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from renkei.communicators import headers
from renkei.communicators.headers import DTYPES, REDUCTIONS, Header, first_misfit, problem_with

any_header = st.builds(
    Header,
    operation=st.sampled_from(headers._OPERATIONS),
    number=st.integers(1, 2**32 - 1),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from([None, *DTYPES]),
    numel=st.integers(0, 2**63),
    ndim=st.integers(0, 64),
    tensors_hash=st.integers(0, 2**64 - 1),
    root=st.integers(0, 2**32 - 1),
    refused=st.booleans(),
)


@given(any_header)
def test_a_header_is_32_bytes_and_comes_out_as_it_went_in(header: Header) -> None:
    assert len(header.pack()) == 32
    assert Header.unpack(header.pack()) == header


def test_the_number_of_calls_may_pass_32_bits() -> None:
    header = Header("all_reduce", number=2**32 + 5)
    assert Header.unpack(header.pack()).number == 5


def test_every_operation_that_ranks_agree_on_has_a_number() -> None:
    folder = Path(headers.__file__).parent
    agreed = {name for path in folder.glob("*.py") for name in re.findall(r'\.agree\(\s*"(\w+)"', path.read_text())}
    assert agreed == set(headers._OPERATIONS)


def test_tensors_are_told_by_number_dimensions_and_hash() -> None:
    header = Header.of("all_gather", 1, [torch.zeros(3, 5), torch.zeros(2), torch.zeros(())])
    assert (header.dtype, header.numel, header.ndim) == (torch.float32, 18, 2)
    nothing = Header.of("all_gather", 1, [])
    assert (nothing.dtype, nothing.numel, nothing.ndim, nothing.tensors_hash) == (None, 0, 0, 0)


DIFFERENT = [
    [torch.zeros(3, 5)], [torch.zeros(5, 3)], [torch.zeros(15)], [torch.zeros(3, 5, dtype=torch.int32)], [],
    [torch.zeros(3, 5), torch.zeros(())], [torch.zeros(()), torch.zeros(3, 5)], [torch.zeros(1, 3, 5)],
]  # fmt: skip


def test_tensors_that_differ_in_anything_have_different_hashes() -> None:
    assert len({Header.of("broadcast_into", 1, tensors).tensors_hash for tensors in DIFFERENT}) == len(DIFFERENT)


BASE = Header("all_reduce", 3, "sum", torch.float32, 15, 2, 77, 0)
CHANGES: dict[str, object] = {
    "operation": "all_gather", "number": 4, "reduction": "max", "root": 1, "dtype": torch.float64, "numel": 14,
    "ndim": 1, "tensors_hash": 78,
}  # fmt: skip


def check_each_difference_is_found() -> None:
    for field, value in CHANGES.items():
        others = [BASE, BASE, replace(BASE, **{field: value}), BASE]
        assert first_misfit(others, same_tensors=True, same_dtype=True) == 2, field


def test_each_difference_is_found_and_its_rank_named() -> None:
    check_each_difference_is_found()
    assert first_misfit([BASE] * 4, same_tensors=True, same_dtype=True) is None


@pytest.mark.parametrize("field", ["numel", "ndim", "tensors_hash", "dtype"])
def test_what_may_differ_is_not_compared(field: str) -> None:
    others = [BASE, replace(BASE, **{field: CHANGES[field]})]
    assert first_misfit(others, same_tensors=False, same_dtype=False) is None


@pytest.mark.parametrize("field", CHANGES)
def test_red_twin_a_field_is_not_compared(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = first_misfit

    def blind(those: Sequence[Header], **options: bool) -> int | None:
        return whole([replace(each, **{field: getattr(those[0], field)}) for each in those], **options)

    monkeypatch.setitem(globals(), "first_misfit", blind)
    with pytest.raises(AssertionError, match=field):
        check_each_difference_is_found()


def test_a_call_is_described_with_its_shapes() -> None:
    tensors = [torch.zeros(3, 5), torch.zeros((), dtype=torch.int8)]
    text = Header.of("reduce_scatter", 7, tensors, root=2, reduction="mean").describe(tensors)
    for part in ("reduce_scatter", "mean", "root 2", "number 7", "float32[3, 5]", "int8[]"):
        assert part in text


def test_what_can_not_be_sent_is_told() -> None:
    assert problem_with(None) is None
    assert problem_with([torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.uint64)]) is None
    assert "ndarray" in str(problem_with([torch.zeros(3).numpy()]))
    assert "to_dense" in str(problem_with([torch.zeros(3, 3).to_sparse()]))
    assert "float8_e8m0fnu" in str(problem_with([torch.zeros(3, dtype=torch.float8_e8m0fnu)]))
