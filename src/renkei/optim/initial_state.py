"""Starting alike: the same structure on every rank, checked, and rank 0's values on every rank, sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from renkei.communicators.communicator import Communicator
from renkei.errors import MismatchError, UsageError
from renkei.nested import map_tensors
from renkei.optim.structure import names_of, parameters_of


def start_alike(comm: Communicator, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    """Check that ranks have built the same, and give them rank 0's values: parameters, buffers, optimizer state.

    Raises:
        UsageError: a parameter has no shape yet.
        MismatchError: ranks have built different things.
    """
    names = names_of(optimizer, model)
    for name, parameter in zip(names, parameters_of(optimizer), strict=True):
        if nn.parameter.is_lazy(parameter):
            raise UsageError(f"{name} has no shape yet; run the model once before creating the optimizer")
    check_alike(comm, describe(optimizer, names, model))
    broadcast_state(comm, optimizer, tensors_of(optimizer, model))


def describe(optimizer: torch.optim.Optimizer, names: Sequence[str], model: nn.Module | None) -> list[str]:
    """One line for each thing that must be alike on all ranks."""
    lines = [f"optimizer {type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"]
    name_of = iter(names)
    for group in optimizer.param_groups:
        lines.append(f"parameter group of {len(group['params'])}")  # its hyper-parameters will be rank 0's
        lines += [_line("parameter", next(name_of), parameter) for parameter in group["params"]]
    if model is not None:
        lines += [_line("model parameter", name, parameter) for name, parameter in model.named_parameters()]
        lines += [_line("buffer", name, buffer) for name, buffer in model.named_buffers()]
    return lines


def check_alike(comm: Communicator, lines: Sequence[str]) -> None:
    """Raise `MismatchError` on every rank, naming the first line in which a rank differs from rank 0."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    for rank, difference in enumerate(comm.all_gather_object(_first_difference(lines, comm.broadcast_object(lines)))):
        if difference is not None:
            mine, roots = difference
            raise MismatchError(
                f"rank {rank} has {mine} where rank 0 has {roots}; build the same model and optimizer on every rank"
            )


def broadcast_state(comm: Communicator, optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> None:
    """Make `tensors` and the optimizer's state and hyper-parameters on all ranks those of rank 0."""
    comm.broadcast_into(tensors)
    state = comm.broadcast_object(map_tensors(_on_cpu, optimizer.state_dict()) if comm.rank == 0 else None)
    if comm.rank != 0:
        optimizer.load_state_dict(state)
        _keep_dtypes(optimizer, state["state"])


def tensors_of(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[Tensor]:
    """All parameters and buffers, each once."""

    def everything() -> Iterator[Tensor]:
        yield from parameters_of(optimizer)
        if model is not None:
            yield from model.parameters()
            yield from model.buffers()

    return list({id(tensor): tensor for tensor in everything()}.values())


def _line(kind: str, name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    gradient = "" if not isinstance(tensor, nn.Parameter) or tensor.requires_grad else " without gradient"
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{kind} {name}: {dtype}{list(tensor.shape)}{place}{gradient}"


def _first_difference(mine: Sequence[str], roots: Sequence[str]) -> tuple[str, str] | None:
    for at in range(max(len(mine), len(roots))):
        pair = tuple(lines[at] if at < len(lines) else "nothing more" for lines in (mine, roots))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return None


def _on_cpu(tensor: Tensor) -> Tensor:
    """Unpickling a GPU tensor would open the sender's GPU on every rank."""
    return tensor.detach().cpu()


def _keep_dtypes(optimizer: torch.optim.Optimizer, states: dict[int, dict[str, Any]]) -> None:
    """Undo what `load_state_dict` does to a state of another dtype than its parameter's: it rounds it to that."""
    parameters = parameters_of(optimizer)
    for number, state in states.items():
        loaded = optimizer.state[parameters[number]]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype != loaded[name].dtype:
                loaded[name] = value.to(loaded[name].device)


def check_chosen_alike(comm: Communicator, chosen: str) -> None:
    """Raise `MismatchError` on every rank unless all have chosen the same, as each describes it."""
    everyones = comm.all_gather_object(chosen)
    for rank, its in enumerate(everyones):
        if its != everyones[0]:
            raise MismatchError(f"rank {rank} has chosen {its} where rank 0 has {everyones[0]}; choose the same")
