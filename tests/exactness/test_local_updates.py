"""Local updates: what ranks have moved is brought together once each, as one process would compute it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import renkei
from exactness.one_process import assert_close, assert_same_bits, build, loss_of, mlp, on_ranks, samples, sgd, values
from renkei.communicators.communicator import Communicator
from renkei.gradients.compression.formats import Int8
from renkei.optim.local_updates import LocalUpdates
from renkei.optim.outer import Outer

STEPS = 11  # in rounds of 3: the last is not whole
OUTERS: dict[str, Outer] = {"average": renkei.outer_average, "nesterov": renkei.outer_nesterov(0.6, 0.8)}


def step_of(model: torch.nn.Module, optimizer: Any, rank: int, step: int, *, alike: bool = False) -> None:
    """With samples of this rank's own: as many as its number and one."""
    optimizer.zero_grad()
    loss_of(model, *samples(3 if alike else 1 + rank, seed=100 * step + rank)).backward()
    optimizer.step()


def on_rank(comm: Communicator, every: Any = 3, steps: int = STEPS, flush_at: int | None = None, **how: Any) -> Any:
    model = build(mlp, seed=comm.rank).double()  # rank 0's counts
    optimizer = sgd(model.parameters())
    local = LocalUpdates(optimizer, comm, model=model, every=every, **how)
    for step in range(steps):
        if step == flush_at:
            local.flush()
        step_of(model, optimizer, comm.rank, step)
    local.flush()
    local.flush()  # there is nothing more
    return values(model)


def alone(
    num_ranks: int,
    outer: Outer,
    *,
    every: Callable[[int], int] = lambda step: 3,
    steps: int = STEPS,
    overlap: bool = False,
    flush_at: int | None = None,
) -> list[Tensor]:
    """The same, computed in one process in the plainest way: all replicas by turns, and a mean."""
    models = [build(mlp).double() for _ in range(num_ranks)]
    optimizers = [sgd(model.parameters()) for model in models]
    shared = [parameter.detach().clone().requires_grad_() for parameter in models[0].parameters()]
    together = outer(shared)
    late: list[Tensor] | None = None  # the mean of what was moved in the round before
    own_late: list[list[Tensor]] | None = None
    starts = [values(model) for model in models]
    left = every(0)

    def use(means: Sequence[Tensor]) -> None:
        for parameter, mean in zip(shared, means, strict=True):
            parameter.grad = mean
        together.step()

    def end_round(*, for_good: bool) -> None:
        nonlocal late, own_late, starts
        moved = [
            [start - now for start, now in zip(starts[rank], values(model), strict=True)]
            for rank, model in enumerate(models)
        ]
        means = [torch.stack(each).mean(dim=0) for each in zip(*moved, strict=True)]
        if late is not None:
            use(late)
        late, own_late = (means, moved) if overlap and not for_good else (None, None)
        if late is None:
            use(means)
        for rank, model in enumerate(models):
            for at, parameter in enumerate(model.parameters()):
                kept = 0 if own_late is None else own_late[rank][at]
                parameter.data = shared[at].detach() - kept
        starts = [values(model) for model in models]

    for step in range(steps):
        if step == flush_at:
            end_round(for_good=True)
            left = every(step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, rank, step)
        left -= 1
        if left == 0:
            end_round(for_good=False)
            left = every(step + 1)
    end_round(for_good=True)
    return [parameter.detach() for parameter in shared]


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_train_as_their_replicas_would_in_one_process(num_ranks: int, overlap: bool, outer: str) -> None:
    by_rank = on_ranks(num_ranks, lambda comm: on_rank(comm, outer=OUTERS[outer], overlap=overlap))
    assert_same_bits(by_rank)
    assert_close(by_rank[0], alone(num_ranks, OUTERS[outer], overlap=overlap), within=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_may_grow_and_be_ended_early(overlap: bool) -> None:
    lengths = renkei.post_local(begin=4, every=5)
    by_rank = on_ranks(2, lambda comm: on_rank(comm, lengths, 16, 7, outer=OUTERS["nesterov"], overlap=overlap))
    assert_same_bits(by_rank)
    right = alone(2, OUTERS["nesterov"], every=lengths, steps=16, overlap=overlap, flush_at=7)
    assert_close(by_rank[0], right, within=1e-12)


def test_one_rank_that_averages_trains_as_if_alone() -> None:
    model = build(mlp).double()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        step_of(model, optimizer, 0, step)
    assert_close(on_ranks(1, on_rank)[0], values(model), within=1e-13)


def test_rounds_of_one_step_are_synchronous_training() -> None:
    """The mean of parameters after one step of SGD is one step with the mean gradient; so is that of its momenta."""

    def together(comm: Communicator) -> list[Tensor]:
        model = build(mlp).double()
        optimizer = renkei.MultiNodeOptimizer(sgd(model.parameters()), comm, model=model)
        for step in range(STEPS):
            step_of(model, optimizer, comm.rank, step)
        return values(model)

    assert_close(on_ranks(3, lambda comm: on_rank(comm, 1))[0], on_ranks(3, together)[0], within=1e-12)


# -- each movement once ---------------------------------------------------------------------------------------------


def move(comm: Communicator, wire: Any, overlap: bool, steps: int = 26) -> tuple[Tensor, Tensor, Tensor]:
    """What is shared in the end, what this rank has moved in all, and what it still owes."""
    parameter = torch.nn.Parameter(torch.zeros(37))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    local = LocalUpdates(optimizer, comm, every=4, wire=wire, overlap=overlap)
    generator = torch.Generator().manual_seed(comm.rank)
    moved = torch.zeros(37)
    for _ in range(steps):
        parameter.grad = torch.randn(37, generator=generator)
        moved -= parameter.grad
        optimizer.step()
    local.flush()
    assert local._exchanged is not None
    owed = torch.zeros(37)
    for feedback in local._exchanged._reducer.turns.state()["feedback"]:
        for part in feedback["owed"]["settled"].values():
            owed -= part.view(-1)  # what is shared goes down by what is given
    return parameter.detach().clone(), moved, owed


def check_each_movement_counts_once(overlap: bool) -> None:
    by_rank = on_ranks(3, lambda comm: move(comm, Int8(block=8), overlap))
    shared = by_rank[0][0]
    assert_same_bits([[each[0]] for each in by_rank])
    moved = torch.stack([each[1] for each in by_rank]).sum(dim=0) / 3
    owed = torch.stack([each[2] for each in by_rank]).sum(dim=0)
    assert (shared - moved).abs().max() > 1e-4  # int8 does lose something
    assert_close([shared + owed], [moved], within=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_shared_and_what_is_owed_are_all_that_was_moved(overlap: bool) -> None:
    check_each_movement_counts_once(overlap)


@pytest.mark.parametrize("defect", ["a round forgotten", "a round twice"])
def test_red_twin_a_movement_that_does_not_count_once_is_seen(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = LocalUpdates._exchange

    def exchange(self: LocalUpdates, exchanged: Any) -> None:
        if self.rounds == 2:
            for moved in self._moved:
                moved.mul_(0 if defect == "a round forgotten" else 2)
        before(self, exchanged)

    monkeypatch.setattr(LocalUpdates, "_exchange", exchange)
    with pytest.raises(AssertionError):
        check_each_movement_counts_once(False)


# -- saved and resumed ------------------------------------------------------------------------------------------------


def interrupted(comm: Communicator, at: int, wire: str, overlap: bool, *, forget: str = "") -> list[Tensor]:
    """Train; at a step, save everything, and go on in a new model with new optimizers."""

    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer, LocalUpdates]:
        model = build(mlp).float()
        optimizer = sgd(model.parameters())
        how: Any = {"every": 3, "wire": wire, "overlap": overlap, "outer": OUTERS["nesterov"]}
        return model, optimizer, LocalUpdates(optimizer, comm, model=model, **how)

    model, optimizer, local = begin()
    for step in range(14):
        if step == at:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), local.state_dict()])
            saved[2].pop(forget, None)
            local.close()
            model, optimizer, local = begin()
            local.load_state_dict({**local.state_dict(), **saved[2]})
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        loss_of(model, *samples(2, seed=100 * step + comm.rank, dtype=torch.float32)).backward()
        optimizer.step()
    local.flush()
    return values(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "power_sgd"])
def test_a_resumed_run_has_the_same_bits(wire: str, overlap: bool) -> None:
    whole = on_ranks(2, lambda comm: interrupted(comm, -1, wire, overlap))
    for at in (6, 7):  # at a round's beginning, and within one
        assert_same_bits([*whole, *on_ranks(2, lambda comm, at=at: interrupted(comm, at, wire, overlap))])


@pytest.mark.parametrize("forget", ["shared", "outer", "given", "counts"])
def test_red_twin_state_that_is_lost_is_seen(forget: str) -> None:
    whole = on_ranks(2, lambda comm: interrupted(comm, -1, "int8", True))
    with pytest.raises(AssertionError):
        assert_same_bits([*whole, *on_ranks(2, lambda comm: interrupted(comm, 7, "int8", True, forget=forget))])


# -- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -3, 2.5, True, "often"])
def test_a_round_has_a_whole_number_of_steps(every: Any) -> None:
    with pytest.raises(renkei.UsageError, match="whole number of steps"):
        on_ranks(1, lambda comm: on_rank(comm, every))


def test_ranks_that_train_something_else_are_told_all_of_them() -> None:
    def wrong(comm: Communicator) -> None:
        model = torch.nn.Linear(3 + comm.rank, 2)
        with pytest.raises(renkei.MismatchError, match="rank 1 has"):
            LocalUpdates(sgd(model.parameters()), comm, model=model, every=2)

    on_ranks(2, wrong)


def test_only_members_can_leave() -> None:
    def wrong(comm: Communicator) -> None:
        model = torch.nn.Linear(3, 2)
        with pytest.raises(renkei.UsageError, match=r"renkei\.join"):
            LocalUpdates(sgd(model.parameters()), comm, every=2).leave()

    on_ranks(1, wrong)
