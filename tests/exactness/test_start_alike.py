"""On creation ranks become alike: structure is compared, values are those of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exactness.one_process import assert_same_bits, build, error_of, loss_of, mlp, on_ranks, samples, values
from renkei.communicators.communicator import Communicator
from renkei.errors import MismatchError, UsageError
from renkei.optim import initial_state
from renkei.optim.multi_node import MultiNodeOptimizer

NUM_RANKS = 3


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *samples(6, seed=seed + step, dtype=torch.float32)).backward()
        optimizer.step()


def check_starts_like_rank_0(optimizer: Callable[[Any, int], torch.optim.Optimizer]) -> None:
    """Whatever each rank did before: parameters, statistics, momentum and settings are rank 0's, and stay alike."""

    def on_rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor], dict[str, Any], list[Tensor]]:
        model = build(with_statistics, seed=comm.rank)
        inner = optimizer(model.parameters(), comm.rank)
        train_alone(model, inner, seed=10 * comm.rank, steps=3 - comm.rank)
        before = values(model)
        wrapped = MultiNodeOptimizer(inner, comm, model=model)
        wrapped.zero_grad()
        after, state = values(model), wrapped.state_dict()
        for step in range(3):
            wrapped.zero_grad()
            loss_of(model.eval(), *samples(6, seed=comm.rank + step, dtype=torch.float32)).backward()
            wrapped.step()
        return before, after, state, values(model)

    results = on_ranks(NUM_RANKS, on_rank)
    for before, after, state, later in results:
        assert_same_bits([results[0][0], after])
        assert_same_bits([results[0][3], later])
        assert state["param_groups"] == results[0][2]["param_groups"]
        assert state["state"].keys() == results[0][2]["state"].keys()
        for number, mine in state["state"].items():
            torch.testing.assert_close(mine, results[0][2]["state"][number], rtol=0, atol=0)
        assert before is not after
    assert not all(torch.equal(*pair) for pair in zip(results[0][0], results[1][0], strict=True))


def sgd_of(parameters: Any, rank: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 / (rank + 1), momentum=0.9, nesterov=rank != 1)


def adamw_of(parameters: Any, rank: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01 * (rank + 1), betas=(0.9, 0.99 - 0.01 * rank), amsgrad=rank == 0)


@pytest.mark.parametrize("optimizer", [sgd_of, adamw_of])
def test_all_ranks_start_with_what_rank_0_has(optimizer: Callable[[Any, int], torch.optim.Optimizer]) -> None:
    check_starts_like_rank_0(optimizer)


def test_settings_only_rank_0_has_reach_the_others() -> None:
    """A learning-rate schedule leaves some in the groups, and so does the checkpoint rank 0 resumed from."""

    def on_rank(comm: Communicator) -> dict[str, Any]:
        model = build(mlp)
        inner = sgd_of(model.parameters(), 0)
        if comm.rank == 0:
            torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=1.0, total_steps=10)
        wrapped = MultiNodeOptimizer(inner, comm, model=model)
        return {name: value for name, value in wrapped.param_groups[0].items() if name != "params"}

    groups = on_ranks(2, on_rank)
    assert groups[0] == groups[1]
    assert "max_momentum" in groups[1]


def test_parameters_that_are_not_the_optimizers_become_rank_0s_too() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(mlp, seed=comm.rank)
        MultiNodeOptimizer(sgd_of(model[4].parameters(), 0), comm, model=model)
        return values(model)

    assert_same_bits(on_ranks(3, on_rank))


def test_without_a_model_the_optimizers_parameters_become_rank_0s() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(mlp, seed=comm.rank)
        MultiNodeOptimizer(sgd_of(model.parameters(), 0), comm)
        return values(model)

    assert_same_bits(on_ranks(3, on_rank))


def test_odd_tensors_become_rank_0s() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model = nn.Module()
        for name, tensor in {
            "scalar": torch.tensor(float(comm.rank)),
            "empty": torch.empty(0, 3),
            "channels_last": torch.full((2, 3, 4, 4), float(comm.rank)).to(memory_format=torch.channels_last),
            "complex": torch.full((3,), comm.rank * 1j, dtype=torch.complex64),
            "half_precision": torch.full((3,), comm.rank, dtype=torch.float16),
        }.items():
            model.register_parameter(name, nn.Parameter(tensor))
        model.register_buffer("counter", torch.tensor(comm.rank))
        model.register_buffer("flags", torch.tensor([comm.rank == 0, False]))
        model.register_buffer("hidden", torch.full((2,), float(comm.rank)), persistent=False)
        MultiNodeOptimizer(sgd_of(model.parameters(), 0), comm, model=model)
        return [*values(model), model.hidden]

    assert_same_bits(on_ranks(3, on_rank))


# -- ranks that built something else ----------------------------------------------------------------------------------


def mismatch(num_ranks: int, make: Callable[[int], tuple[torch.optim.Optimizer, nn.Module | None]]) -> str:
    """The text of the error that all ranks get."""

    def on_rank(comm: Communicator) -> BaseException | None:
        inner, model = make(comm.rank)
        return error_of(lambda: MultiNodeOptimizer(inner, comm, model=model))

    errors = on_ranks(num_ranks, on_rank)
    assert all(isinstance(error, MismatchError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors
    return str(errors[0])


def wider_on_rank_2(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3 + (rank == 2)))
    return sgd_of(model.parameters(), 0), model


def deeper_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(2 + (rank == 1))])
    return sgd_of(model.parameters(), 0), model


def shallower_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    return deeper_on_rank_1(1 - (rank == 1))


def another_dtype_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(5, 4).to(torch.float64 if rank == 1 else torch.float32)
    return sgd_of(model.parameters(), 0), model


def another_name_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.ModuleDict({"extra" if rank == 1 else "main": nn.Linear(5, 4)})
    return sgd_of(model.parameters(), 0), model


def another_class_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(5, 4)
    return (torch.optim.Adam if rank == 1 else torch.optim.SGD)(model.parameters(), lr=0.1), model


def more_groups_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(5, 4)
    whole = [{"params": list(model.parameters())}]
    cut = [{"params": [parameter]} for parameter in model.parameters()]
    return torch.optim.SGD(cut if rank == 1 else whole, lr=0.1), model


def frozen_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(5, 4)
    model.bias.requires_grad_(rank != 1)
    return sgd_of(model.parameters(), 0), model


def another_buffer_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(5, 4)
    model.register_buffer("steps", torch.zeros(2 if rank == 1 else 1))
    return sgd_of(model.parameters(), 0), model


def no_model_on_rank_1(rank: int) -> tuple[torch.optim.Optimizer, nn.Module | None]:
    model = nn.Linear(5, 4)
    return sgd_of(model.parameters(), 0), None if rank == 1 else model


@pytest.mark.parametrize(
    ("make", "found", "expected"),
    [
        (wider_on_rank_2, "rank 2 has parameter 1.weight: float32[4, 4]", "parameter 1.weight: float32[3, 4]"),
        (deeper_on_rank_1, "rank 1 has parameter group of 6", "parameter group of 4"),
        (shallower_on_rank_1, "rank 1 has parameter group of 4", "parameter group of 6"),
        (another_dtype_on_rank_1, "rank 1 has parameter weight: float64[4, 5]", "parameter weight: float32[4, 5]"),
        (another_name_on_rank_1, "rank 1 has parameter extra.weight", "parameter main.weight"),
        (another_class_on_rank_1, "rank 1 has optimizer Adam", "optimizer SGD"),
        (more_groups_on_rank_1, "rank 1 has optimizer SGD with 2 parameter", "optimizer SGD with 1 parameter"),
        (frozen_on_rank_1, "rank 1 has parameter bias: float32[4] without gradient", "parameter bias: float32[4]"),
        (another_buffer_on_rank_1, "rank 1 has buffer steps: float32[2]", "buffer steps: float32[1]"),
        (no_model_on_rank_1, "rank 1 has parameter parameter 0 of group 0", "parameter weight"),
    ],
)
def test_ranks_that_built_something_else_are_named_with_the_first_difference(
    make: Callable[[int], Any], found: str, expected: str
) -> None:
    text = mismatch(NUM_RANKS, make)
    assert found in text
    assert f"where rank 0 has {expected}" in text


def test_a_lazy_module_is_refused_by_name() -> None:
    def on_rank(comm: Communicator) -> BaseException | None:
        model = nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3))
        inner = sgd_of(model.parameters(), 0)
        return error_of(lambda: MultiNodeOptimizer(inner, comm, model=model))

    for error in on_ranks(2, on_rank):
        assert isinstance(error, UsageError)
        assert "1.weight has no shape yet" in str(error)


# -- red twins --------------------------------------------------------------------------------------------------------


def test_red_twin_one_parameter_not_sent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors_of = initial_state.tensors_of
    monkeypatch.setattr(initial_state, "tensors_of", lambda *args: tensors_of(*args)[1:])
    with pytest.raises(AssertionError):
        check_starts_like_rank_0(sgd_of)


def test_red_twin_buffers_not_sent_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors_of = initial_state.tensors_of
    monkeypatch.setattr(initial_state, "tensors_of", lambda optimizer, model: tensors_of(optimizer, None))
    with pytest.raises(AssertionError):
        check_starts_like_rank_0(sgd_of)


def test_red_twin_momentum_not_sent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_state, "broadcast_state", lambda comm, optimizer, tensors: comm.broadcast_into(tensors))
    with pytest.raises(AssertionError):
        check_starts_like_rank_0(adamw_of)


def test_red_twin_a_structure_that_is_not_compared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_state, "_first_difference", lambda mine, roots: None)
    with pytest.raises(AssertionError):
        mismatch(2, another_name_on_rank_1)


def test_a_state_of_another_dtype_than_its_parameter_keeps_it() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        inner.state[weight]["momentum_buffer"] = torch.tensor([1.0, 2.0, 1.0 + 2**-20]) * (comm.rank == 0)
        return [MultiNodeOptimizer(inner, comm).state[weight]["momentum_buffer"]]

    by_rank = on_ranks(NUM_RANKS, on_rank)
    assert by_rank[0][0].dtype == torch.float32
    assert_same_bits(by_rank)
    assert by_rank[0][0].tolist() == [1.0, 2.0, 1.0 + 2**-20]


def test_a_scripts_default_device_is_no_matter() -> None:
    def on_rank(comm: Communicator) -> list[Tensor]:
        model = build(mlp, seed=comm.rank)
        inputs, target = samples(6, seed=comm.rank, dtype=torch.float32)
        with torch.device("meta"):
            optimizer = MultiNodeOptimizer(torch.optim.AdamW(model.parameters()), comm, model=model)
            for _ in range(3):
                optimizer.zero_grad()
                optimizer.backward(loss_of(model, inputs, target), weight=6)
                optimizer.step()
        return values(model)

    assert_same_bits(on_ranks(NUM_RANKS, on_rank))
