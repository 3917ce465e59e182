"""Which failure is told, where, and with what exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from renkei.errors import (
    DeadlineError,
    GradientError,
    LaunchError,
    MismatchError,
    PeerLostError,
    RenkeiError,
    UsageError,
)
from renkei.failures import first_cause
from renkei.failures.first_cause import Failure


def failure_of(error: BaseException, rank: int = 1) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return Failure.of(raised, rank)


@pytest.mark.parametrize("kind", [UsageError, LaunchError, MismatchError])
def test_wrong_usage_is_one_line_without_traceback(kind: type[UsageError]) -> None:
    failure = failure_of(kind("what, why, and the fix"))
    assert (failure.exit_code, failure.details, failure.summary) == (2, "", "what, why, and the fix")
    assert str(failure) == "renkei: what, why, and the fix"
    assert not failure.is_consequence


@pytest.mark.parametrize("kind", [RuntimeError, ZeroDivisionError, DeadlineError, GradientError, RenkeiError])
def test_an_error_is_told_with_traceback_rank_and_host(kind: type[Exception]) -> None:
    failure = failure_of(kind("boom"), rank=3)
    assert (failure.exit_code, failure.summary) == (1, f"{kind.__name__}: boom")
    assert not failure.is_consequence
    text = str(failure)
    assert text.startswith("Traceback")
    assert text.count("Traceback") == 1
    assert "raise error" in text
    assert f"first cause: rank 3 on {os.uname().nodename}: {kind.__name__}: boom" in text.splitlines()[-1]


def test_a_lost_peer_is_a_consequence() -> None:
    failure = failure_of(PeerLostError("rank 1 lost another rank"))
    assert failure.is_consequence
    assert (failure.exit_code, failure.details) == (1, "")


def consequence(at: float, rank: int) -> Failure:
    return Failure(rank, at, "lost", "", 1, is_consequence=True)


def cause(at: float, rank: int) -> Failure:
    return Failure(rank, at, "boom", "", 1)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([cause(2.0, 0), cause(1.0, 1), cause(3.0, 2)], 1),
        ([consequence(1.0, 0), cause(2.0, 1)], 1),
        ([cause(2.0, 3), consequence(1.0, 1), consequence(0.5, 2)], 3),
        ([consequence(2.0, 0), consequence(1.0, 2)], 2),
    ],
)
def test_the_first_cause_is_the_earliest_that_is_no_consequence(failures: list[Failure], rank: int) -> None:
    assert first_cause.first_cause(failures).rank == rank
    assert first_cause.first_cause(failures[::-1]).rank == rank


def test_what_is_written_is_read(tmp_path: Path) -> None:
    failures = [
        failure_of(error, rank) for rank, error in enumerate([ValueError("連\n携"), UsageError("x"), KeyError(3)])
    ]
    assert first_cause.read_all(tmp_path) == []
    for failure in failures:
        first_cause.write(failure, tmp_path)
    assert first_cause.read_all(tmp_path) == failures
    assert len(list(tmp_path.iterdir())) == 3  # nothing half-written is left


@pytest.fixture
def _unfailed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (first_cause.JOB_VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(first_cause, "FAILED", type(first_cause.FAILED)())


@pytest.mark.usefixtures("_unfailed")
def test_without_a_launcher_of_ours_the_failure_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_cause.report(UsageError("what and why")) == 2
    assert first_cause.FAILED.is_set()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "renkei: what and why\n")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.usefixtures("_unfailed")
def test_our_launcher_is_told_and_has_the_last_word(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {first_cause.JOB_VARIABLE: str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    assert first_cause.report(ZeroDivisionError("boom")) == 1
    (failure,) = first_cause.read_all(tmp_path)
    assert (failure.rank, failure.summary) == (rank, "ZeroDivisionError: boom")
    # rank 0's standard error is the console's, the others' is a log
    assert ("boom" in capsys.readouterr().err) == (rank > 0)


@pytest.mark.usefixtures("_unfailed")
def test_what_a_rank_of_ours_starts_by_mpiexec_does_not_report_as_a_rank_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    inner = {"PMI_RANK": "2", "PMI_SIZE": "3"}
    for name, value in (outer | inner | {first_cause.JOB_VARIABLE: str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    first_cause.report(ZeroDivisionError("boom"))
    assert first_cause.read_all(tmp_path) == []
    assert "first cause: rank 2 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 1),
        ({"RANK": "1"}, 0),  # contradictory, so it isn't known
        ({}, 0),
    ],
)
@pytest.mark.usefixtures("_unfailed")
def test_the_rank_is_known_whatever_the_launcher(
    variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    first_cause.report(ZeroDivisionError("boom"))
    assert f"first cause: rank {rank} on" in capsys.readouterr().err


# -- the hook, in processes of its own ----------------------------------------------------------------------------


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


INSTALL = "from renkei.failures import first_cause; first_cause.install(); "


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("1 / 0", 1, ["ZeroDivisionError", "first cause: rank 0"]),
        ("from renkei.errors import UsageError; raise UsageError('what and why')", 2, ["renkei: what and why"]),
        ("raise SystemExit(5)", 5, []),
        ("pass", 0, []),
    ],
)
def test_an_uncaught_exception_is_told_once_and_gives_the_exit_code(
    statement: str, code: int, words: list[str]
) -> None:
    done = run_python(INSTALL + statement)
    assert done.returncode == code
    assert done.stderr.count("Traceback") == (code == 1)
    for word in words:
        assert word in done.stderr.splitlines()[-1] or word in done.stderr


BUSY = """
import sys, threading, time
def work():
    time.sleep(1)
    print("late", flush=True)
threading.Thread(target=work).start()
print("said before", end="")
1 / 0
"""


def check_threads_are_not_waited_for(before: str = "") -> None:
    """A process that fails ends at once, whatever its other threads do; what it has printed is there."""
    done = run_python(INSTALL + before + BUSY)
    assert (done.returncode, done.stdout) == (1, "said before")
    assert "first cause: rank 0" in done.stderr


def test_an_uncaught_exception_does_not_wait_for_threads() -> None:
    check_threads_are_not_waited_for()


def test_red_twin_the_end_waits_for_threads() -> None:
    with pytest.raises(AssertionError):
        check_threads_are_not_waited_for("import os, sys; os._exit = sys.exit\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_closed_or_none_does_not_keep_it_from_ending(stream: str) -> None:
    for statement in (f"sys.{stream}.close()", f"sys.{stream} = None"):
        assert run_python(f"{INSTALL}import sys; {statement}; 1 / 0").returncode == 1


def test_an_interrupt_is_left_to_python() -> None:
    done = run_python(INSTALL + "raise KeyboardInterrupt")
    assert done.returncode not in (0, 1, 2)
    assert "first cause" not in done.stderr


def test_a_hook_that_was_there_before_is_called_too() -> None:
    mine = "import sys; sys.excepthook = lambda *error: print('mine', error[0].__name__, file=sys.stderr); "
    for statement, kind in (("1 / 0", "ZeroDivisionError"), ("raise KeyboardInterrupt", "KeyboardInterrupt")):
        done = run_python(mine + INSTALL + INSTALL + statement)
        assert done.stderr.count(f"mine {kind}") == 1
        assert done.returncode != 0


def test_only_the_main_thread_installs_it() -> None:
    code = "import sys, threading; from renkei.failures import first_cause; "
    code += "t = threading.Thread(target=first_cause.install); t.start(); t.join(); "
    assert run_python(code + "print(sys.excepthook is sys.__excepthook__)").stdout.strip() == "True"


def test_red_twin_a_consequence_taken_for_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    earliest = min([consequence(1.0, 0), cause(2.0, 1)], key=lambda failure: failure.time)
    assert earliest.is_consequence
    monkeypatch.setattr(first_cause, "first_cause", lambda failures: min(failures, key=lambda failure: failure.time))
    with pytest.raises(AssertionError):
        test_the_first_cause_is_the_earliest_that_is_no_consequence([consequence(1.0, 0), cause(2.0, 1)], 1)
