"""What is said of an MPI library, without one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from renkei.communicators.backends.mpi import implementation
from renkei.communicators.backends.mpi.implementation import (
    asks_library,
    check_world,
    find_mismatch,
    find_problem,
    is_cuda_aware,
    translate,
)
from renkei.errors import LaunchError, MismatchError, RenkeiError


def fake(size: int = 1, level: int = 3, vendor: str = "MPICH") -> Any:
    levels = {f"THREAD_{name}": at for at, name in enumerate(["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"])}
    return SimpleNamespace(
        COMM_WORLD=SimpleNamespace(size=size, rank=0),
        Query_thread=lambda: level,
        get_vendor=lambda: (vendor, (5, 0, 2)),
        ERR_TRUNCATE=15,
        **levels,
    )


def test_an_mpi_of_enough_ranks_and_threads_has_no_problem() -> None:
    assert find_problem(fake(size=3), 3, {"PMI_SIZE": "3"}) is None
    assert find_problem(fake(size=3), 2, {}) is None
    assert find_problem(fake(), 1, {}) is None


@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        ({}, r"they were not started by its mpiexec; start them by mpiexec -n 4, or by srun"),
        ({"PMI_SIZE": "1"}, r"they were not started by its mpiexec"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            r"but Open MPI's mpiexec has started them \(OMPI_COMM_WORLD_SIZE=4\)",
        ),
        ({"PMI_SIZE": "4"}, r"but the mpiexec of MPICH or of one of its kind has started them \(PMI_SIZE=4\)"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"but srun has started them .*srun --mpi=pmi2"),
        ({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}, r"mpiexec .* \(PMI_SIZE=4\)"),
    ],
)
def test_a_world_that_is_too_small_is_explained(variables: dict[str, str], fix: str) -> None:
    problem = find_problem(fake(), 4, variables)
    assert problem is not None
    with pytest.raises(LaunchError, match=r"^MPICH 5\.0\.2.* sees 1 of 4 ranks.*" + fix):
        raise LaunchError(problem)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_too_low_a_level_of_threads_is_a_problem(level: int) -> None:
    problem = find_problem(fake(level=level), 1, {})
    assert problem is not None
    assert f"MPI_THREAD_{['SINGLE', 'FUNNELED', 'SERIALIZED'][level]}, but MPI_THREAD_MULTIPLE is needed" in problem


def test_the_world_is_compared_with_what_the_launcher_said() -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    check_world(fake(size=2), variables)
    check_world(fake(size=2), {})  # a launcher that isn't known
    with pytest.raises(LaunchError, match="sees 1 of 2 ranks"):
        check_world(fake(), variables)


def test_another_mpi_under_open_mpi_is_told_before_it_begins() -> None:
    variables = {"OMPI_COMM_WORLD_SIZE": "2"}
    assert find_mismatch(fake(), {}) is None
    assert find_mismatch(fake(vendor="Open MPI"), variables) is None
    assert "mpi4py has loaded MPICH 5.0.2" in (find_mismatch(fake(), variables) or "")


def test_no_mpi4py_and_an_mpi_that_has_ended_are_told() -> None:
    with (
        mock.patch.dict(sys.modules, {"mpi4py": None}),
        pytest.raises(LaunchError, match=r"pip install .renkei.mpi"),
    ):
        implementation.load()
    ended = SimpleNamespace(Is_finalized=lambda: True)
    with (
        mock.patch.object(implementation, "_import", return_value=ended),
        pytest.raises(LaunchError, match="Finalize"),
    ):
        implementation.load()


@pytest.mark.parametrize(("said", "expected"), [("0", False), ("1", True)])
def test_what_a_user_says_of_cuda_goes_first(said: str, expected: bool) -> None:
    assert is_cuda_aware({"RENKEI_MPI_CUDA": said, "MV2_USE_CUDA": "1"}) is expected


def test_cuda_is_asked_of_variables_and_of_the_library() -> None:
    with pytest.raises(LaunchError, match="RENKEI_MPI_CUDA='yes' must be 0 or 1"):
        is_cuda_aware({"RENKEI_MPI_CUDA": "yes"})
    assert is_cuda_aware({"MV2_USE_CUDA": "1"})
    assert not is_cuda_aware({})


def test_each_library_is_asked_in_its_own_way() -> None:
    def answer(kind: int, address: Any) -> int:
        ctypes.cast(address, ctypes.POINTER(ctypes.c_int))[0] = 1 if kind == 0 else 0
        return 0

    assert asks_library(SimpleNamespace(MPIX_GPU_query_support=answer))
    assert not asks_library(SimpleNamespace(MPIX_GPU_query_support=lambda *_: 1))
    assert asks_library(SimpleNamespace(MPIX_Query_cuda_support=lambda: 1))
    assert not asks_library(SimpleNamespace(MPIX_Query_cuda_support=lambda: 0))
    assert not asks_library(SimpleNamespace())


def test_errors_of_mpi_are_ours() -> None:
    def error(kind: int) -> Any:
        return SimpleNamespace(Get_error_class=lambda: kind, Get_error_string=lambda: "Message truncated\nand a stack")

    mismatch = translate(fake(), error(15), rank=1, doing="recv")
    assert isinstance(mismatch, MismatchError)
    assert "rank 1: recv: more came than there is room for (Message truncated)" in str(mismatch)
    assert type(translate(fake(), error(16), rank=1, doing="recv")) is RenkeiError


def test_registering_is_light_and_may_be_repeated() -> None:
    program = (
        "import sys, torch.distributed as dist, renkei.communicators.backends as backends\n"
        "backends.register()\n"
        "assert dist.Backend.backend_list.count('mpi-renkei') == 1\n"
        "assert not [name for name in sys.modules if name.startswith(('mpi4py', 'renkei.communicators.backends.'))]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
