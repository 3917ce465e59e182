"""How ranks are started by mpiexec: which one, and with what words and variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from renkei.errors import UsageError
from renkei.launch import mpi
from renkei.launch.mpi import command_line, find_mpiexec, says_open_mpi, variables_for

# What real ones say.
VERSIONS = {
    "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n": True,
    "mpiexec (Open MPI) 5.0.6\n\nReport bugs to https://www.open-mpi.org/community/help/\n": True,
    "HYDRA build details:\n    Version:                                 5.0.2\n": False,
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n": False,
    "": False,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_open_mpi_is_told_from_others_by_what_it_says(version: str) -> None:
    assert says_open_mpi(version) == VERSIONS[version]


def test_only_open_mpi_must_be_told_that_there_may_be_more_ranks_than_cores() -> None:
    command = ["python", "-m", "renkei", "bench"]
    assert command_line("/bin/mpiexec", 3, command, is_open_mpi=False) == ["/bin/mpiexec", "-n", "3", *command]
    assert command_line("mpiexec", 3, command, is_open_mpi=True) == ["mpiexec", "--oversubscribe", "-n", "3", *command]


def test_only_open_mpi_as_root_needs_variables() -> None:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert variables_for(is_open_mpi=True, is_root=True) == allowed
    for is_open_mpi, is_root in ((True, False), (False, True), (False, False)):
        assert variables_for(is_open_mpi=is_open_mpi, is_root=is_root) == {}


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def check_the_one_beside_python_counts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    on_path, beside = executable(folder / "path" / "mpiexec"), folder / "python" / "mpiexec"
    patch.setenv("PATH", str(on_path.parent))
    patch.setattr(sys, "executable", str(beside.with_name("python")))
    assert find_mpiexec() == str(on_path)
    executable(beside)
    assert find_mpiexec() == str(beside)


def test_the_mpiexec_beside_this_python_counts_then_that_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_the_one_beside_python_counts(tmp_path, monkeypatch)


def test_red_twin_any_mpiexec_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "find_mpiexec", lambda: mpi.shutil.which("mpiexec"))
    with pytest.raises(AssertionError):
        check_the_one_beside_python_counts(tmp_path, monkeypatch)


def test_without_mpiexec_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"no mpiexec in .* nor on PATH; pip install 'renkei\[mpi\]'"):
        mpi.start(["true"], 2)


def test_an_mpiexec_that_does_not_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = executable(tmp_path / "mpiexec", "#!/nowhere/sh\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=f"{broken} doesn't run"):
        mpi.start(["true"], 2)
