"""Real processes that train on a GPU: N ranks equal one, and NCCL says what it can't do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import renkei
from exactness.one_process import assert_close, assert_same_bits
from needs import gpu

EPOCHS, GLOBAL_BATCH_SIZE = 3, 53  # a prime, so that ranks never get equal parts
pytestmark = gpu


def train(backend: str, error_in_weight: int = 0) -> list[Tensor]:
    """On one of several ranks: the parameters after training, on the CPU."""
    comm = renkei.create_communicator(backend=backend, device="cuda:0", timeout=60)
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(359, 20), torch.randint(5, (359,)))
    model = nn.Sequential(nn.Linear(20, 101), nn.Tanh(), nn.Linear(101, 5)).to(comm.device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = renkei.MultiNodeOptimizer(inner, comm, model=model)
    data = renkei.scatter_dataset(dataset, comm, shuffle=True, seed=0)
    loader = renkei.DataLoader(data, comm, global_batch_size=GLOBAL_BATCH_SIZE)
    for _ in range(EPOCHS):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), target)
            optimizer.backward(loss, weight=len(target) + comm.rank * error_in_weight)
            optimizer.step()
    comm.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_on_one_gpu_train_like_one_through_host_memory(num_ranks: int, backend: str) -> None:
    by_rank = renkei.run(train, num_ranks, backend)
    assert_same_bits(by_rank)
    assert_close(by_rank[0], renkei.run(train, 1, "gloo")[0], within=1e-5)


def test_one_rank_trains_over_nccl() -> None:
    assert_close(renkei.run(train, 1, "nccl")[0], renkei.run(train, 1, "gloo")[0], within=1e-5)


def test_two_ranks_on_one_gpu_are_refused_by_nccl_before_it_hangs() -> None:
    with pytest.raises(renkei.UsageError, match="ranks 0 and 1 use the same GPU"):
        renkei.run(train, 2, "nccl")


def test_red_twin_a_wrong_weight_is_seen() -> None:
    with pytest.raises(AssertionError):
        assert_close(renkei.run(train, 2, "gloo", 9)[0], renkei.run(train, 1, "gloo")[0], within=1e-5)
