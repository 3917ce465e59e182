"""Gradients that travel in fewer bytes: how near the result is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import renkei
from exactness.one_process import assert_same_bits, build, gradients, loss_of, mlp, on_ranks, samples
from renkei.communicators.communicator import Communicator
from renkei.gradients.compression import formats
from renkei.gradients.compression.formats import Bf16, Fp16, Int8, PowerSgd, read_format
from renkei.gradients.compression.sixteen_bits import Bf16Codec
from renkei.optim.multi_node import MultiNodeOptimizer

# By name of a format, how far a gradient's norm may be off, relative to it.
NEAR = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11, "int8": 2 / 127, "power_sgd": 1e-6}


def gradients_on_ranks(num_ranks: int, wire: Any, dtype: torch.dtype = torch.float32) -> list[list[Any]]:
    """Of one batch; nothing of this model is large enough for a matrix of low rank."""

    def on_rank(comm: Communicator) -> list[Any]:
        model = build(mlp).to(dtype)
        optimizer = MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model, wire=wire)
        inputs, target = (whole[comm.rank :: comm.size] for whole in samples(13, dtype=dtype))
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, inputs, target), weight=len(target))
        return gradients(model)

    return on_ranks(num_ranks, on_rank)


def distance(found: list[Any], expected: list[Any]) -> float:
    flat = [torch.cat([each.double().view(-1) for each in some]) for some in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("wire", formats.FORMATS)
def test_the_mean_is_nearly_that_of_one_process(wire: str) -> None:
    by_rank = gradients_on_ranks(3, wire)
    assert_same_bits(by_rank)
    off = distance(by_rank[0], gradients_on_ranks(1, "fp32")[0])
    assert off < NEAR[wire]
    if wire in ("bf16", "fp16", "int8"):
        assert off > 1e-6, "it did not travel in fewer bytes"


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_other_dtypes_travel_as_they_are(wire: str) -> None:
    by_rank = gradients_on_ranks(3, wire, torch.float64)
    assert distance(by_rank[0], gradients_on_ranks(1, "fp32", torch.float64)[0]) < 1e-14


def test_a_matrix_of_low_rank_is_found_exactly() -> None:
    """Of one that has rank 2 on each of 3 ranks, six columns are enough; of one, two power iterations are."""

    def on_rank(comm: Communicator) -> float:
        weight = nn.Parameter(torch.zeros(64, 48))
        optimizer = MultiNodeOptimizer(torch.optim.SGD([weight], lr=1.0), comm, wire=PowerSgd(rank=6))
        generator = torch.Generator().manual_seed(comm.rank)
        mine = torch.randn(64, 2, generator=generator) @ torch.randn(2, 48, generator=generator)
        for _ in range(3):
            optimizer.zero_grad()
            (weight * mine).sum().backward()
            optimizer.step()
        expected = -3 * comm.all_reduce(mine, "mean")
        return float((weight.detach() - expected).norm() / expected.norm())

    assert max(on_ranks(3, on_rank)) < 1e-5


def test_red_twin_a_codec_that_loses_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Bf16Codec.decode
    monkeypatch.setattr(Bf16Codec, "decode", lambda *arguments: decode(*arguments) * 1.01)
    off = distance(gradients_on_ranks(3, "bf16")[0], gradients_on_ranks(1, "fp32")[0])
    assert off > NEAR["bf16"]


def test_ranks_must_choose_the_same() -> None:
    def on_rank(comm: Communicator) -> str:
        parameters = [nn.Parameter(torch.zeros(3))]
        with pytest.raises(renkei.MismatchError) as raised:
            MultiNodeOptimizer(torch.optim.SGD(parameters), comm, wire=Int8(block=64 if comm.rank == 2 else 256))
        return str(raised.value)

    said = on_ranks(3, on_rank)
    assert len(set(said)) == 1
    assert "rank 2 has chosen wire=Int8(block=64" in said[0]


@pytest.mark.parametrize(("wire", "says"), [("in8", "did you mean 'int8'"), (8, "wire is a int"), (None, "NoneType")])
def test_a_format_there_is_not_is_refused(wire: Any, says: str) -> None:
    with pytest.raises(renkei.UsageError, match=says):
        read_format(wire)


@pytest.mark.parametrize("make", [lambda: Int8(block=0), lambda: Fp16(block=True), lambda: PowerSgd(rank=1.5)])
def test_senseless_settings_are_refused(make: Any) -> None:
    with pytest.raises(renkei.UsageError, match="must be a whole number, at least 1"):
        make()


def test_formats_have_names() -> None:
    assert read_format("bf16") == Bf16()
    assert read_format(Fp16(block=7)) == Fp16(block=7)
