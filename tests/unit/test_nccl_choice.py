"""Choosing backend and device: what can be checked without a GPU."""

from __future__ import annotations

import pytest
import torch

from renkei.communicators.groups import check_one_rank_per_gpu, choose_backend, choose_device, device_identity
from renkei.errors import UsageError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_cpu_gets_gloo_by_itself_or_by_name() -> None:
    assert choose_backend(None, CPU) == "gloo"
    assert choose_backend("gloo", CPU) == "gloo"
    assert choose_backend("gloo", GPU) == "gloo"


def test_a_gpu_gets_nccl_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, backend in ((True, "nccl"), (False, "gloo")):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda there=there: there)
        assert choose_backend(None, GPU) == backend


def test_nccl_without_gpu_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'nccl' needs GPUs.*cpu.*backend='gloo'"):
        choose_backend("nccl", CPU)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match="nccl"):
        choose_backend("nccl", GPU)


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'ncll'.*gloo, nccl"):
        choose_backend("ncll", CPU)


def test_the_device_is_the_one_asked_for_or_the_own_gpu_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu", 3) == CPU
    assert choose_device(GPU, 3) == GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None, 3) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, expected in ((8, 3), (2, 1), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert choose_device(None, 3) == torch.device("cuda", expected)


@pytest.mark.parametrize("identities", [["a"], ["a", "b", "c"], ["", "", ""], ["", "a", ""]])
def test_ranks_with_gpus_of_their_own_are_fine(identities: list[str]) -> None:
    check_one_rank_per_gpu(identities)


@pytest.mark.parametrize(
    ("identities", "ranks"), [(["a", "a"], "ranks 0 and 1"), (["a", "b", "", "b", "a"], "ranks 1 and 3")]
)
def test_two_ranks_on_one_gpu_are_named(identities: list[str], ranks: str) -> None:
    with pytest.raises(UsageError, match=f"{ranks} use the same GPU.*backend='gloo'"):
        check_one_rank_per_gpu(identities)


def test_ranks_on_the_cpu_share_nothing() -> None:
    assert device_identity(CPU) == ""
