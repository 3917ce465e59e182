"""Which process of how many this one is, from the variables its launcher set. Pure.

Every launcher sets several variables that must fit together. A launcher is recognized by all of them, never by one,
and variables that contradict one another are an error that names them: guessing is how a job trains alone, or hangs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from renkei.errors import LaunchError

Variables = Mapping[str, str]


@dataclass(frozen=True)
class LaunchEnvironment:
    """What a launcher told this process.

    Attributes:
        launcher: "renkei", "torchrun", "openmpi", "mpich", "slurm", "variables" (set by hand) or "plain" (none).
        rank, size: this process among all.
        local_size: how many there are on its node; None where the launcher doesn't tell.
        node: the launcher's name or number of the node, where it has one.
        address, port: where rank 0 is to be met; None where the launcher doesn't tell.
        source: the variables that gave rank and size.
    """

    launcher: str
    rank: int
    size: int
    local_size: int | None
    node: str | None
    address: str | None
    port: int | None
    source: tuple[str, str]

    @property
    def is_distributed(self) -> bool:
        """Whether a launcher started this process."""
        return self.launcher != "plain"


# What a rank that `renkei launch` has started is told, and what tells it that another launcher has started it.
_OURS = ("RENKEI_JOB", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_OTHERS = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "SLURM_STEP_ID")


def without_place(variables: Variables) -> dict[str, str]:
    """The variables without those that make another launcher's process of a process; for the ranks of a new job.

    What is found beside RENKEI_JOB, then, is of a launcher that came later: an mpiexec that a rank has started, say.
    """
    return {name: value for name, value in variables.items() if not name.startswith(_OF_OTHERS)}


def detect(variables: Variables) -> LaunchEnvironment:
    """The launcher's word, or rank 0 of 1 if there was none.

    Raises:
        LaunchError: variables are missing, are no numbers, or contradict one another.
    """
    claims = [claim for read in _READERS if (claim := read(variables)) is not None]
    if not claims:
        return LaunchEnvironment("plain", 0, 1, 1, None, None, None, ("", ""))
    innermost, *others = claims
    if innermost.launcher == "renkei" and others:
        return detect({name: value for name, value in variables.items() if name not in _OURS})
    for other in others:
        _check_consistent(innermost, other, variables)
    return _with_meeting_place(innermost, variables)


def _torchrun(variables: Variables) -> LaunchEnvironment | None:
    claim = _claim(variables, "variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    if claim is None:
        return None
    if "TORCHELASTIC_RUN_ID" in variables:
        return replace(claim, launcher="torchrun")
    return replace(claim, launcher="renkei") if "RENKEI_JOB" in variables else claim


def _open_mpi(variables: Variables) -> LaunchEnvironment | None:
    return _claim(
        variables,
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        None,
    )


def _mpich(variables: Variables) -> LaunchEnvironment | None:
    if "SLURM_STEP_ID" in variables and "MPI_LOCALRANKID" not in variables:
        return None  # srun --mpi=pmi2 sets PMI_RANK for the MPI library; the step's own variables say more
    return _claim(variables, "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None)


def _slurm(variables: Variables) -> LaunchEnvironment | None:
    # A batch script looks like rank 0 of SLURM_NTASKS but is no step. An interactive shell that salloc started is a
    # step of one task, and a job submitted from within a step inherits that step's variables: there the counts differ.
    steps_tasks = variables.get("SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_ID" not in variables or steps_tasks is None or steps_tasks != variables.get("SLURM_NTASKS"):
        return None
    claim = _claim(variables, "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID")
    if claim is None or "SLURM_GTIDS" not in variables:
        return claim
    return replace(claim, local_size=len(variables["SLURM_GTIDS"].split(",")))  # the ranks on this node


# The innermost first: torchrun may run inside an MPI or Slurm job, mpiexec inside a Slurm job.
_READERS: tuple[Callable[[Variables], LaunchEnvironment | None], ...] = (_torchrun, _open_mpi, _mpich, _slurm)


def _claim(
    variables: Variables,
    launcher: str,
    rank: str,
    size: str,
    local_rank: str,
    local_size: str,
    node: str | None,
) -> LaunchEnvironment | None:
    """What one launcher's variables say; None if neither rank nor size is among them."""
    present = [name for name in (rank, size) if name in variables]
    if not present:
        return None
    if len(present) == 1:
        missing = size if present == [rank] else rank
        raise LaunchError(
            f"{present[0]}={variables[present[0]]} is set but {missing} is not; set both, or unset {present[0]}"
        )
    claim = LaunchEnvironment(
        launcher=launcher,
        rank=_integer(variables, rank),
        size=_integer(variables, size),
        local_size=_integer(variables, local_size) if local_size in variables else None,
        node=variables.get(node) if node else None,
        address=None,
        port=None,
        source=(rank, size),
    )
    _check_below(variables, rank, size)
    if local_rank in variables and local_size in variables:
        _check_below(variables, local_rank, local_size)
    return claim


def _check_below(variables: Variables, lower: str, upper: str) -> None:
    if not 0 <= _integer(variables, lower) < _integer(variables, upper):
        raise LaunchError(
            f"{lower}={variables[lower]} and {upper}={variables[upper]} contradict each other: the first must be at "
            "least 0 and below the second; unset what is left over from another launcher"
        )


def _check_consistent(inner: LaunchEnvironment, outer: LaunchEnvironment, variables: Variables) -> None:
    """Launchers may be nested, but a number set by hand must be the scheduler's, and equal sizes mean equal ranks."""
    if inner.launcher == "torchrun":
        _check_no_second_crowd(inner, outer, variables)
        return
    same_size = inner.size == outer.size
    if same_size and inner.rank == outer.rank:
        return
    nested = inner.launcher in ("openmpi", "mpich") and outer.launcher == "slurm" and not same_size
    if not nested:
        listing = _listing(variables, *inner.source, *outer.source)
        raise LaunchError(f"{listing} contradict one another; unset those that are left over from another launcher")


def _check_no_second_crowd(torchrun: LaunchEnvironment, other: LaunchEnvironment, variables: Variables) -> None:
    """Which of the two came first can't be told, but several processes of a job of one would each train alone."""
    if torchrun.size == 1 < other.size:
        raise LaunchError(
            f"{_listing(variables, *torchrun.source)} (torchrun) and {_listing(variables, *other.source)} "
            f"({other.launcher}): {other.size} processes would each train alone; start all ranks by one of the two, or "
            "unset what the other has set"
        )


def _listing(variables: Variables, *names: str) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names)


def _with_meeting_place(claim: LaunchEnvironment, variables: Variables) -> LaunchEnvironment:
    address = variables.get("MASTER_ADDR")
    port = _integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else None
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is no port; choose one from 1024 to 65535")
    if claim.launcher == "slurm":
        address = address or first_host(variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", "")))
        port = port or _port_of_step(variables)
    if claim.launcher in ("renkei", "torchrun", "variables") and (address is None or port is None):
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise LaunchError(
            f"{claim.source[0]} and {claim.source[1]} are set but {missing} is not, so the other ranks can't be found; "
            "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, or use renkei launch or torchrun"
        )
    if (address is None) != (port is None):
        missing, present = ("MASTER_ADDR", "MASTER_PORT") if address is None else ("MASTER_PORT", "MASTER_ADDR")
        raise LaunchError(f"{present} is set but {missing} is not; set both or none")
    return replace(claim, address=address, port=port)


def first_host(nodelist: str) -> str | None:
    """The first host of a Slurm list such as ``gpu[003-007,9],login1``; None if the list is empty."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if match is None:
        return None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _port_of_step(variables: Variables) -> int:
    """A port that the tasks of one job step agree on without a message, and other steps most likely don't choose."""
    step = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}.{variables.get('SLURM_RESTART_COUNT')}"
    return 20000 + zlib.crc32(step.encode()) % 12000  # below the range from which Linux gives ports by itself


def _integer(variables: Variables, name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise LaunchError(f"{name}={variables[name]!r} is not a whole number; set it to one, or unset it") from None
