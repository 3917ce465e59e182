"""The communicators keep the contract with tensors on a GPU, which ranks share: Gloo lets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from contract.communicator_contract import CommunicatorContract
from needs import gpu
from renkei.communicators.communicator import Communicator
from renkei.testing import run_on_ranks

CUDA = torch.device("cuda", 0)
pytestmark = gpu


def on_its_device(comm: Communicator, check: Callable[..., Any], *args: Any) -> Any:
    """Let the check's tensors be made where the communicator computes."""
    with comm.device:
        return check(comm, *args)


class ContractOnCuda(CommunicatorContract):
    backend = "gloo"

    def run(self, size: int, check: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return run_on_ranks(
            size, on_its_device, check, *args, communicator=self.name, backend=self.backend, device=CUDA, **options
        )


class TestFlatOnCuda(ContractOnCuda):
    name = "flat"


class TestNaiveOnCuda(ContractOnCuda):
    name = "naive"


class TestNullOnCuda(ContractOnCuda):
    name = "null"


class TestSharedMemoryOnCuda(ContractOnCuda):
    name, backend = "flat", "shared_memory"


class TestStagedOnCuda(ContractOnCuda):
    name, backend = "staged", "shared_memory"
