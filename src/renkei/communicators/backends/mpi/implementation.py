"""The MPI library of this process: loading it, what it is, and what may be wrong with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from renkei.errors import LaunchError, MismatchError, RenkeiError
from renkei.launch.environments import detect

CUDA_VARIABLE = "RENKEI_MPI_CUDA"  # whether MPI takes addresses of GPU memory: 0 or 1, where that is found wrongly
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_LIBRARIES = ("libmpi.", "libmpich.", "libmpi_cray.")
# By the variable in which a launcher tells how many ranks it has started, the launcher.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "the mpiexec of MPICH or of one of its kind",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_ONE_MPI = "use the mpiexec of the MPI that mpi4py loads, or let MPI4PY_LIBMPI name the libmpi of the mpiexec you use"
_LOADING = threading.Lock()


def load() -> Any:
    """The module `mpi4py.MPI`, which loads libmpi when it is imported first, with MPI begun.

    Raises:
        LaunchError: there is no mpi4py, it finds no libmpi, or MPI was ended.
    """
    with _LOADING:
        mpi = _import()
        if mpi.Is_finalized():
            raise LaunchError("MPI_Finalize was called; leave that to mpi4py, which does it when the process ends")
        if not mpi.Is_initialized():
            if warning := find_mismatch(mpi):  # MPI itself may be about to end this process
                print(f"renkei: {warning}", file=sys.stderr, flush=True)
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
    return mpi


def _import() -> Any:
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        said = "; ".join(str(error).splitlines())
        raise LaunchError(
            f"mpi4py doesn't load ({said}); pip install 'renkei[mpi]', or let MPI4PY_LIBMPI name the "
            "libmpi that your mpiexec belongs to"
        ) from None
    return MPI


def find_mismatch(mpi: Any, variables: Mapping[str, str] = os.environ) -> str | None:
    """What to say if Open MPI has started this process but another MPI was loaded, which often can't begin then."""
    started = "OMPI_COMM_WORLD_SIZE"
    if started not in variables or mpi.get_vendor()[0] == "Open MPI":
        return None
    return (
        f"{_LAUNCHERS[started]} has started this process ({started}={variables[started]}), but mpi4py has loaded "
        f"{name(mpi)}; {_ONE_MPI}"
    )


def check_world(mpi: Any, variables: Mapping[str, str] = os.environ) -> None:
    """Raise `LaunchError` if MPI can't be used, or knows of fewer ranks than this process's launcher has started."""
    problem = find_problem(mpi, detect(variables).size, variables)
    if problem is not None:
        raise LaunchError(problem)


def find_problem(mpi: Any, num_ranks: int, variables: Mapping[str, str] = os.environ) -> str | None:
    """Why `num_ranks` ranks can't talk over this MPI, if they can't, and how to mend it."""
    if mpi.COMM_WORLD.size < num_ranks:
        return _explain_size(mpi, num_ranks, variables)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return (
            f"MPI was begun with {thread_level(mpi)}, but MPI_THREAD_MULTIPLE is needed, for several threads send; "
            f"leave mpi4py.rc.threads and mpi4py.rc.thread_level as they are, and see that {name(mpi)} was built so"
        )
    return None


def _explain_size(mpi: Any, num_ranks: int, variables: Mapping[str, str]) -> str:
    found = f"{name(mpi)}, which mpi4py has loaded, sees {mpi.COMM_WORLD.size} of {num_ranks} ranks"
    started = [each for each in _LAUNCHERS if variables.get(each, "1") != "1"]
    if not started:
        return f"{found}: they were not started by its mpiexec; start them by mpiexec -n {num_ranks}, or by srun"
    said = f"{found}, but {_LAUNCHERS[started[0]]} has started them ({started[0]}={variables[started[0]]})"
    if started[0].startswith("SLURM"):
        return f"{said}: they speak different protocols; try srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list names them)"
    return f"{said}: they belong to different MPIs; {_ONE_MPI}"


def translate(mpi: Any, error: Any, *, rank: int, doing: str) -> RenkeiError:
    """Renkei's error for one that MPI raised while this rank was `doing` something with others."""
    said = error.Get_error_string().splitlines()[0]
    if error.Get_error_class() == mpi.ERR_TRUNCATE:
        return MismatchError(f"rank {rank}: {doing}: more came than there is room for ({said}); sizes must fit")
    return RenkeiError(f"rank {rank}: {doing} failed: MPI says: {said}")


# -- what it is ---------------------------------------------------------------------------------------------------


def describe_mpi() -> str:
    """The library's version and file, MPI's version, the thread level, and whether it takes GPU memory."""
    mpi = load()
    version, subversion = mpi.Get_version()
    cuda = "CUDA-aware" if is_cuda_aware() else "not CUDA-aware"
    return f"{name(mpi)}, MPI {version}.{subversion}, {thread_level(mpi)}, {cuda}"


def name(mpi: Any) -> str:
    """The library's name and version, and its file if that is known."""
    vendor, numbers = mpi.get_vendor()
    path = find_library()
    return f"{vendor} {'.'.join(map(str, numbers))}" + (f" ({path})" if path else "")


def thread_level(mpi: Any) -> str:
    """The name of the level at which threads may call MPI."""
    levels = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"]
    return "MPI_THREAD_" + next(each for each in levels if getattr(mpi, f"THREAD_{each}") == mpi.Query_thread())


def find_library() -> str | None:
    """The file of the libmpi that is loaded; None where the system doesn't tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.name.startswith(_LIBRARIES):
                return str(path)
    return None


def is_cuda_aware(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether MPI takes addresses of GPU memory: as RENKEI_MPI_CUDA says, else as the library does.

    Raises:
        LaunchError: the variable is neither 0 nor 1.
    """
    said = variables.get(CUDA_VARIABLE)
    if said not in (None, "0", "1"):
        raise LaunchError(f"{CUDA_VARIABLE}={said!r} must be 0 or 1: whether MPI takes addresses of GPU memory")
    if said is not None:
        return said == "1"
    if variables.get("MV2_USE_CUDA") == "1":  # MVAPICH's switch
        return True
    try:
        return asks_library(ctypes.CDLL(find_library()))
    except OSError:
        return False


def asks_library(library: Any) -> bool:
    """What the library says; both questions are extensions that not every library has."""
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH, which heeds MPIR_CVAR_ENABLE_GPU
        answer = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer)) == 0 and answer.value != 0
    return hasattr(library, "MPIX_Query_cuda_support") and library.MPIX_Query_cuda_support() != 0
