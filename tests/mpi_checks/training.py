"""What of torch is built on a process group: DDP, FSDP, checkpoints, meshes, functional collectives."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from contract.values import assert_same, numbers
from mpi_checks.common import default_group, rank, reduced, size
from renkei.communicators.backends.mpi.transport import MpiTransport
from renkei.communicators.work_queue import Transfer

STEPS, BATCH, WIDTH = 4, 5, 211


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)], nn.Linear(WIDTH, 3))


def samples(step: int, of: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + of)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 3, generator=generator)


def train(model: nn.Module, ranks: list[int]) -> None:
    """Some steps, on the samples of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (torch.cat(parts) for parts in zip(*[samples(step, each) for each in ranks], strict=True))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


def reference() -> dict[str, Tensor]:
    """The parameters that one process gives on all ranks' samples."""
    model = build()
    train(model, list(range(size())))
    return model.state_dict()


def assert_close(actual: dict[str, Any]) -> None:
    for name, expected in reference().items():
        found = actual[name].full_tensor() if isinstance(actual[name], DTensor) else actual[name]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def check_ddp_trains_like_one_process_and_sends_while_it_computes() -> None:
    model, some_are_added = build(), threading.Event()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.2)
    begin_all_reduce = MpiTransport.begin_all_reduce

    def noted(transport: MpiTransport, *arguments: Any) -> Transfer | None:
        begun = begin_all_reduce(transport, *arguments)
        assert begun is not None
        begun.operation.when_done(some_are_added.set)
        return begun

    is_first_step = iter([True])  # whose gradients DDP sends all at once

    def await_sum(*_: object) -> None:
        """Before the backward pass is over; where sums wait for that, this waits in vain."""
        assert next(is_first_step, False) or some_are_added.wait(10)
        some_are_added.clear()

    model[1].register_full_backward_pre_hook(await_sum)
    before = default_group().bytes_moved["allreduce"]
    with mock.patch.object(MpiTransport, "begin_all_reduce", noted):
        train(wrapped, [rank()])
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert default_group().bytes_moved["allreduce"] - before == STEPS * num_bytes
    assert_close(model.state_dict())


def check_ddp_with_unused_parameters_and_compressed_gradients() -> None:
    """Whether a parameter was used is summed too; a hook may send gradients as float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
    wrapped = DistributedDataParallel(_UsesOne(model), find_unused_parameters=True)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    wrapped(torch.ones(3, 7)).sum().backward()
    for parameter in model[0].parameters():
        assert parameter.grad is not None
        everyones: list[Any] = [None] * size()
        dist.all_gather_object(everyones, parameter.grad)
        assert_same(everyones[-1], parameter.grad)
    assert all(parameter.grad is None for parameter in model[1].parameters())


class _UsesOne(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers[0](inputs)
        return output


def sharded(**options: Any) -> nn.Sequential:
    model = build()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def check_fsdp_trains_like_one_process() -> None:
    model = sharded()
    before = default_group().bytes_moved.copy()
    train(model, [rank()])
    moved = default_group().bytes_moved - before
    assert {"allgather", "reduce_scatter"} <= set(moved)
    assert_close(dict(model.named_parameters()))


def check_fsdp_in_bfloat16() -> None:
    """Only near to one process, but equal on all ranks and not far off."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    train(model, [rank()])
    for name, expected in reference().items():
        found: Any = model.get_parameter(name)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0.05, atol=0.02)


def check_a_checkpoint_is_saved_and_loaded() -> None:
    model = sharded()
    train(model, [rank()])
    saved = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    with shared_folder() as folder:
        checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/at-once")
        checkpoint.async_save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/meanwhile").result()
        dist.barrier()
        for each in ("at-once", "meanwhile"):
            other = sharded()
            state = {"model": get_model_state_dict(other)}
            checkpoint.load(state, checkpoint_id=f"{folder}/{each}")
            other.load_state_dict(state["model"])
            for name, value in other.state_dict().items():
                assert_same(value.full_tensor(), saved[name])


@contextmanager
def shared_folder() -> Iterator[str]:
    """One for all ranks, until all are done with it."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        yield folder[0]
        dist.barrier()


def check_meshes_of_one_and_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (size(),))
    tensor = numbers(0, (4 * size(), 3))
    shards = distribute_tensor(tensor, mesh, [Shard(0)])
    assert_same(shards.to_local(), tensor.split(4)[rank()])
    assert_same(shards.full_tensor(), tensor)
    assert_same((shards + 1).redistribute(mesh, [Replicate()]).to_local(), tensor + 1)
    square = init_device_mesh("cpu", (1, size()), mesh_dim_names=("outer", "inner"))
    total = numbers(rank())
    dist.all_reduce(total, group=square["inner"].get_group())
    assert_same(total, reduced(torch.float32, "sum", 37))
    dist.all_reduce(total, group=square["outer"].get_group())
    assert_same(total, reduced(torch.float32, "sum", 37))


def check_functional_collectives() -> None:
    everyone = list(range(size()))
    mine = numbers(rank(), (6 * size(),))
    assert_same(functional.all_reduce(mine, "sum", everyone) + 0, reduced(torch.float32, "sum", 6 * size()))
    gathered = functional.all_gather_tensor(mine, 0, everyone) + 0
    assert_same(gathered, torch.cat([numbers(each, (6 * size(),)) for each in everyone]))
    part = functional.reduce_scatter_tensor(mine, "avg", 0, everyone) + 0
    assert_same(part, reduced(torch.float32, "mean", 6 * size()).split(6)[rank()])
    exchanged = functional.all_to_all_single(mine, None, None, everyone) + 0
    assert_same(exchanged, torch.cat([numbers(each, (6 * size(),)).split(6)[rank()] for each in everyone]))
    assert_same(functional.broadcast(mine, 1, everyone) + 0, numbers(1, (6 * size(),)))


def check_red_twin_ddp_whose_sums_go_nowhere() -> None:
    """Each rank would train on its own samples."""
    begins_none = mock.patch.object(MpiTransport, "begin_all_reduce", return_value=None)
    with begins_none, mock.patch.object(MpiTransport, "all_reduce"):
        model = build()
        train(DistributedDataParallel(model), [rank()])
    try:
        assert_close(model.state_dict())
    except AssertionError:
        return
    raise AssertionError("ranks that exchanged nothing were not noticed")
