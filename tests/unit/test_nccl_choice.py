"""Choosing backend and device: what can be checked without a GPU, and before any other rank is there."""

from __future__ import annotations

import os
import weakref

import pytest
import torch

from renkei.communicators import factory
from renkei.communicators.factory import create_communicator
from renkei.communicators.groups import (
    check_one_rank_per_gpu,
    check_usable,
    choose_device,
    create_group,
    device_identity,
    own_gpu,
)
from renkei.errors import LaunchError, UsageError
from renkei.failures import first_cause

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_nccl_without_gpu_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'nccl' needs GPUs.*cpu.*backend='gloo'"):
        check_usable("nccl", CPU)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match="nccl"):
        check_usable("nccl", GPU)


def test_shared_memory_without_linux_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    check_usable("shared_memory", CPU)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match=r"'shared_memory' needs Linux.*backend='gloo'"):
        check_usable("shared_memory", CPU)


def see_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("asked", ["cpu", CPU, "cuda:0", GPU, "cuda:3"])
def test_the_device_is_the_one_asked_for(asked: str | torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(4, monkeypatch)
    assert own_gpu(choose_device(asked), 2) == torch.device(asked)


@pytest.mark.parametrize("asked", [None, "cuda", torch.device("cuda")])
def test_a_gpu_without_a_number_is_the_ranks_own(
    asked: str | torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, expected in ((8, 3), (2, 1), (1, 0)):
        see_gpus(count, monkeypatch)
        assert own_gpu(choose_device(asked), 3) == torch.device("cuda", expected)


def test_without_gpu_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(0, monkeypatch)
    assert own_gpu(choose_device(None), 3) == CPU


@pytest.mark.parametrize("asked", ["gpu", "GPU:0", "", "meta", "mps", "cuda:-1", "cuda:x", 3.0])
def test_no_device_renkei_computes_on_is_wrong_usage(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(2, monkeypatch)
    with pytest.raises(UsageError, match=rf"device is '{asked}', but must be 'cpu', 'cuda'"):
        choose_device(asked)


@pytest.mark.parametrize(("asked", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_wrong_usage(asked: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(count, monkeypatch)
    with pytest.raises(UsageError, match=f"device is '{asked}', but this process sees {count} GPUs.*'cpu'"):
        choose_device(asked)


# Arguments, and what the error must name.
WRONG = [
    ({"name": "flt"}, "'flt'.*'flat'"),
    ({"name": "flat/glo"}, "'glo'.*'gloo'"),
    ({"name": "flat/"}, "backend ''.*gloo, mpi, nccl"),
    ({"backend": "ncll"}, "'ncll'.*'nccl'"),
    ({"name": "flat/nccl", "device": "cpu"}, "'nccl' needs GPUs"),
    ({"name": "flat/gloo", "backend": "nccl"}, "contradict"),
    ({"name": "pure_nccl", "device": "cpu"}, "'nccl' needs GPUs"),
    ({"name": "flat/shared_memory+gloo"}, "does not tell apart; use one of hierarchical, staged, two_dimensional"),
    ({"name": "naive", "backend": "shared_memory+gloo"}, "communicator 'naive' does not tell apart"),
    ({"name": "hierarchical/shared_memory+"}, "backend ''.*gloo, mpi, nccl"),
    ({"device": "gpu"}, "device is 'gpu'"),
    ({"device": "cuda:9999"}, "device is 'cuda:9999'"),
    ({"timeout": 0}, "timeout is 0 s"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_what_is_wrong_is_told_before_anybody_is_waited_for(
    arguments: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(factory, "in_a_job", lambda: True)
    monkeypatch.setattr(first_cause, "install", lambda: installed.append(True))
    monkeypatch.setattr(factory, "join", lambda: pytest.fail("the job is joined"))
    with pytest.raises(UsageError, match=words):
        create_communicator(**arguments)  # type: ignore[arg-type]
    assert installed  # so under any launcher it is a line and exit code 2


def test_a_group_is_not_made_over_an_unknown_backend() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(UsageError, match=r"'glo'.*'gloo'"):
        create_group(store, rank=0, size=1, backend="glo", device=CPU, address="127.0.0.1", timeout=1, num_threads=1)


@pytest.mark.parametrize(("variables", "is_installed"), [({}, False), ({"RANK": "0"}, True)])
def test_a_process_no_launcher_started_ends_as_python_ends_it(
    variables: dict[str, str], is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise LaunchError("enough")

    installed: list[bool] = []
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(first_cause, "install", lambda: installed.append(True))
    monkeypatch.setattr(factory, "join", refuse)
    with pytest.raises(LaunchError):
        create_communicator()
    assert bool(installed) == is_installed


def test_a_forked_process_does_not_close_its_parents_communicator() -> None:
    class Closing:
        closed = False

        def close(self) -> None:
            self.closed = True

    comm = Closing()
    factory._close(weakref.ref(comm), os.getpid() + 1)  # type: ignore[arg-type]
    assert not comm.closed
    factory._close(weakref.ref(comm), os.getpid())  # type: ignore[arg-type]
    assert comm.closed


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
