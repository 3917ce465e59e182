"""DDP with our hooks: the mean, the same on all ranks, over several buckets, and nothing lost for good."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import renkei
from renkei import hooks

STEPS = 7
HOOKS = ["bf16_mean", "fp16_mean", "int8_mean", "power_sgd_mean"]


class Weights(nn.Module):
    """A loss that is linear, so that gradients are what `forward` is given; several buckets."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(300, 211), (13,), (331, 257), (7, 3), (101, 503)]
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, coefficients: list[Tensor]) -> Tensor:
        return torch.stack([(p * c).sum() for p, c in zip(self.all, coefficients, strict=True)]).sum()


def coefficients(step: int, rank: int, model: Weights) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(each.shape, generator=generator) for each in model.all]


def train(backend: str, hook: str, skipped: int | None = None, reload_at: int | None = None) -> dict[str, Any]:
    """On one rank: parameters after steps of SGD with a rate of 1, and how far the books are from balancing."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = Weights()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    state = hooks.State()
    ddp.register_comm_hook(state, getattr(hooks, hook))
    due = [torch.zeros(each.shape, dtype=torch.float64) for each in model.all]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = math.inf if step == skipped and rank == 1 else 1.0
        (ddp(coefficients(step, rank, model)) * factor).backward()
        if step == skipped:
            continue
        optimizer.step()
        for other in range(size):
            for total, each in zip(due, coefficients(step, other, model), strict=True):
                total += each.double() / size
        if step == reload_at:
            state.load_state_dict(state.state_dict())
    owed = state.state_dict()["owed"]
    numbers = {id(parameter): number for parameter, number in state._numbers.items()}
    off = 0.0
    for parameter, expected in zip(model.all, due, strict=True):
        in_all = owed.get(numbers[id(parameter)], torch.zeros(parameter.numel())).double() / size
        dist.all_reduce(in_all)
        difference = in_all.view(parameter.shape) - parameter.detach().double() - expected
        off = max(off, float(difference.nan_to_num(nan=math.inf).abs().max()))
    return {"parameters": [each.detach().clone() for each in model.all], "off": off}


def in_group(fn: Callable[..., Any], backend: str, *arguments: Any) -> Any:
    comm = renkei.create_communicator("flat/gloo")
    store = dist.PrefixStore("ddp", comm.store)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    try:
        return fn(backend, *arguments)
    finally:
        dist.destroy_process_group()
        comm.close()


def assert_alike(by_rank: list[dict[str, Any]]) -> None:
    for each in by_rank[1:]:
        for one, other in zip(by_rank[0]["parameters"], each["parameters"], strict=True):
            assert torch.equal(one, other)


def with_each_hook(backend: str) -> dict[str, Any]:
    return {hook: train(backend, hook) for hook in HOOKS}


def test_ranks_stay_alike_and_near_the_mean() -> None:
    by_rank = renkei.run(in_group, 3, with_each_hook, "gloo")
    for hook in HOOKS:
        assert_alike([each[hook] for each in by_rank])
        assert by_rank[0][hook]["off"] < (1e-4 if hook in ("int8_mean", "power_sgd_mean") else STEPS * 4 * 2**-8), hook


def test_a_skipped_step_and_a_saved_state_change_nothing_in_the_books() -> None:
    by_rank = renkei.run(in_group, 2, train, "shared-memory-renkei", "int8_mean", 2, 4)
    assert_alike(by_rank)
    assert by_rank[0]["off"] < 1e-4


def with_defects(backend: str) -> dict[str, float]:
    """How far off the books are when new buckets know nothing of old ones, when an infinity stays, without a defect."""
    with mock.patch.object(hooks.State, "_dissolve", lambda state, key: state._buckets.pop(key)):
        forgotten = train(backend, "int8_mean")["off"]
    with mock.patch.object(hooks.Feedback, "forget", hooks.Feedback.settle):
        infinite = train(backend, "int8_mean", 2)["off"]
    return {"forgotten": forgotten, "infinite": infinite, "none": train(backend, "int8_mean", 2)["off"]}


def test_red_twin_a_wrong_entry_is_seen() -> None:
    off = renkei.run(in_group, 2, with_defects, "gloo")[0]
    assert off["none"] < 1e-4
    assert min(off["forgotten"], off["infinite"]) > 1e-4


def wrong_state(backend: str) -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(None, hooks.bf16_mean)
    with pytest.raises(Exception, match=r"must be a renkei\.hooks\.State") as raised:
        ddp(torch.ones(1, 2)).sum().backward()
    return str(raised.value)


def test_another_state_is_refused() -> None:
    assert "NoneType" in renkei.run(in_group, 1, wrong_state, "gloo")[0]
