"""Codecs lose no more than they say, and never hide what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from renkei.gradients.compression.codec import Codec
from renkei.gradients.compression.int8 import Int8Codec
from renkei.gradients.compression.sixteen_bits import Bf16Codec, Fp16Codec

CODECS = [Bf16Codec(), Fp16Codec(block=8), Int8Codec(block=8)]
SIZES = [0, 1, 7, 8, 9, 16, 17, 1009, 2**16 + 21]


def passed_through(codec: Codec, values: Tensor) -> Tensor:
    data = codec.encode(values)
    assert data.dtype == torch.uint8
    assert data.shape == codec.room_for(values).shape == (codec.num_bytes(values.numel()),)
    read = codec.decode(data, values.numel())
    assert read.dtype == torch.float32
    assert read.shape == values.shape
    return read


def largest_of_its_block(values: Tensor, block: int) -> Tensor:
    return torch.cat([each.abs().max().expand(each.shape) for each in values.split(block)])


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e8, 1e38])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_lost_is_bounded(size: int, magnitude: float) -> None:
    values = magnitude * torch.randn(size, generator=torch.Generator().manual_seed(size)).clamp(-3, 3)
    lost = [(passed_through(codec, values) - values).abs().double() for codec in CODECS]
    if size:
        assert (lost[0] <= values.abs().double() * 2**-8).all()
        assert (lost[1] <= values.abs().double() * 2**-11 + largest_of_its_block(values, 8).double() * 2**-39).all()
        assert (lost[2] <= largest_of_its_block(values, 8).double() * (1 / 254 + 1e-6)).all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_they_give_they_give_again(codec: Codec) -> None:
    once = passed_through(codec, torch.randn(1009, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(passed_through(codec, once), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_and_the_smallest_numbers(codec: Codec) -> None:
    assert passed_through(codec, torch.zeros(17)).eq(0).all()
    smallest = torch.tensor([1e-45, -1e-45, 0.0] * 5)
    assert passed_through(codec, smallest).abs().le(1.5e-45).all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("others", [0.0, 1.0, 3e38, math.inf])
def test_what_is_not_finite_stays_so_at_its_place_and_other_blocks_are_left_alone(
    codec: Codec, value: float, others: float
) -> None:
    values = torch.full((8,), others)
    values[5] = value
    read = passed_through(codec, torch.cat([torch.ones(8), values, torch.ones(3)]))
    assert not read[8 + 5].isfinite()
    assert read[:8].eq(1).all()
    assert read[16:].eq(1).all()


def test_fp16_neither_overflows_nor_loses_the_small_ones() -> None:
    values = torch.tensor([7e4, 1e9, 3e38, 1e-7, 1e-30])
    for value in values:
        assert passed_through(Fp16Codec(block=8), value.expand(8)).allclose(value.expand(8), rtol=2**-11, atol=0)


def test_bytes() -> None:
    assert [Bf16Codec().num_bytes(n) for n in (0, 1, 300)] == [0, 2, 600]
    assert [Fp16Codec(block=4096).num_bytes(n) for n in (0, 1, 4097)] == [0, 6, 2 * 4097 + 8]
    assert [Int8Codec(block=256).num_bytes(n) for n in (0, 1, 256, 257)] == [0, 5, 260, 265]
