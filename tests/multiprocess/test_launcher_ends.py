"""However the launcher ends, its ranks end with it, and what they started too where that can be."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import leaks
from needs import linux
from processes import LEAVE_PID, eventually, finish, read_pids, start

LAUNCHER = "import sys; from renkei.launch.local import launch; launch(['script', sys.argv[1]], int(sys.argv[2]))"


@pytest.fixture
def sleepers(tmp_path: Path) -> Path:
    """A script whose ranks leave their process numbers and sleep."""
    script = tmp_path / "script.py"
    script.write_text(LEAVE_PID + "import time\ntime.sleep(60)\n")
    return script


def start_launcher(script: Path, size: int) -> subprocess.Popen[str]:
    folder = script.parent
    return start("-c", LAUNCHER, str(script), str(size), variables={"PIDS": str(folder), "TMPDIR": str(folder)})


def check_ended(pids: list[int]) -> None:
    assert leaks.eventually_ended(pids), f"{[pid for pid in pids if leaks.is_running(pid)]} still run"


@linux
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_told_to_end_leaves_nothing(how: signal.Signals, sleepers: Path) -> None:
    launcher = start_launcher(sleepers, 3)
    pids = read_pids(sleepers.parent, 3)
    launcher.send_signal(how)
    ((code, _),) = finish([launcher])
    assert code == (143 if how == signal.SIGTERM else -signal.SIGINT)
    check_ended(pids)
    assert not list(sleepers.parent.glob("renkei-*"))


@linux
def test_a_launcher_that_is_killed_leaves_no_rank(sleepers: Path) -> None:
    launcher = start_launcher(sleepers, 3)
    pids = read_pids(sleepers.parent, 3)
    launcher.kill()
    finish([launcher])
    check_ended(pids)


@linux
def test_a_launcher_killed_while_its_ranks_begin_leaves_no_rank(sleepers: Path) -> None:
    launcher = start_launcher(sleepers, 2)
    assert eventually(lambda: len(leaks.descendants(launcher.pid)) == 2)
    pids = sorted(leaks.descendants(launcher.pid))
    launcher.kill()
    finish([launcher])
    check_ended(pids)


@linux
def test_red_twin_a_rank_that_outlives_its_launcher(sleepers: Path) -> None:
    script = sleepers.with_name("outliving.py")
    script.write_text(f"import ctypes\nctypes.CDLL(None).prctl(1, 0)\n{sleepers.read_text()}")
    launcher = start_launcher(script, 1)
    (pid,) = read_pids(sleepers.parent, 1)
    launcher.kill()
    launcher.wait()
    assert not leaks.eventually_ended([pid], patience=0.3)
    os.kill(pid, signal.SIGKILL)
    finish([launcher])
