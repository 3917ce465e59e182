from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _torch_is_warm(_own_temporary_folder: None) -> None:
    """The first step of an optimizer loads torch's compiler, which takes seconds and sets an environment variable."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()
