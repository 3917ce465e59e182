"""What some tests need and not every machine has; each skip says what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch


def needs(there: bool, reason: str) -> pytest.MarkDecorator:
    """Skip a test, with a reason, where what it needs isn't there."""
    return pytest.mark.skipif(not there, reason=reason)


MPIEXEC = Path(sys.prefix, "bin", "mpiexec")
OPEN_MPIEXEC = Path("/usr/bin/mpiexec.openmpi")
OPEN_MPI_LIBRARY = Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "", "libmpi.so.40")

compiler = needs(shutil.which("g++") is not None, "needs g++, for torch.compile writes C++: apt-get install g++")
gpu = needs(torch.cuda.is_available(), "needs a GPU and a build of torch that uses it")
linux = needs(sys.platform == "linux", "needs Linux: it looks into /proc")
mpich = needs(
    MPIEXEC.exists() and importlib.util.find_spec("mpi4py") is not None,
    "needs mpiexec and mpi4py in this environment: pip install mpi4py mpich",
)
open_mpi = needs(
    OPEN_MPIEXEC.exists() and OPEN_MPI_LIBRARY.exists() and importlib.util.find_spec("mpi4py") is not None,
    "needs Open MPI beside mpi4py: apt-get install openmpi-bin libopenmpi3; pip install mpi4py",
)
