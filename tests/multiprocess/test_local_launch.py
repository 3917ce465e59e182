"""Ranks as processes of this host: what they return, how they fail, and that all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leaks
from renkei.errors import RankFailedError, RenkeiError, UsageError
from renkei.failures.first_cause import Failure, write
from renkei.launch import local
from renkei.launch.local import launch, run, threads_per_rank

HANG = 15.0


def test_results_come_by_rank_from_a_closure() -> None:
    factor = 7

    def multiply(addend: int) -> tuple[int, str]:
        return int(os.environ["RANK"]) * factor + addend, os.environ["WORLD_SIZE"]

    assert run(multiply, 3, 5) == [(5, "3"), (12, "3"), (19, "3")]


def test_one_rank_and_more_ranks_than_cores() -> None:
    assert run(lambda: os.environ["RANK"], 1) == ["0"]
    assert run(lambda: int(os.environ["RANK"]), 7) == list(range(7))


def test_a_function_of_a_module_that_only_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_of_the_users.py").write_text("import os\ndef rank(): return int(os.environ['RANK'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    import a_module_of_the_users  # type: ignore[import-not-found]

    assert run(a_module_of_the_users.rank, 2) == [0, 1]


def test_each_rank_is_told_its_place() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    threads = os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(2)))
    ports = set()
    for rank, values in enumerate(run(lambda: [os.environ[name] for name in names], 2)):
        *place, port, its_threads = values
        ports.add(port)
        assert (place, its_threads) == ([str(rank), "2", str(rank), "2", "127.0.0.1"], threads)
    assert len(ports) == 1


@pytest.mark.parametrize(("given", "told"), [("abc", None), ("0", None), ("3", "3"), ("3,2", "3,2")])
def test_a_number_of_threads_that_is_none_is_not_passed_on(
    given: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert run(os.getenv, 1, "OMP_NUM_THREADS") == [told or str(threads_per_rank(1))]


def test_threads_are_the_cores_divided() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [threads_per_rank(size) for size in (1, cores, 10 * cores)] == [cores, 1, 1]


def test_what_a_launcher_around_it_has_set_is_not_taken_for_the_jobs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    around = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "SLURM_STEP_ID": "0",
    }
    for name, value in (around | {"OMP_NUM_THREADS": "3"}).items():
        monkeypatch.setenv(name, value)
    assert run(lambda: [around.keys() & os.environ.keys(), os.environ["OMP_NUM_THREADS"]], 1) == [[set(), "3"]]


def test_what_rank_0_prints_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda: print("from rank", os.environ["RANK"]), 2)
    assert capsys.readouterr().out == "from rank 0\n"


@pytest.mark.parametrize("size", [0, -1])
def test_no_ranks_are_wrong_usage(size: int) -> None:
    with pytest.raises(UsageError, match=f"number of ranks is {size}"):
        run(lambda: None, size)
    with pytest.raises(UsageError, match=f"number of ranks is {size}"):
        launch(["script", "nothing.py"], size)


# -- failures -----------------------------------------------------------------------------------------------------


def fail_on(rank: int, fail: Callable[[], object]) -> RenkeiError:
    """The error of a job of 3 in which one rank fails and the others would go on for long."""

    def body() -> None:
        import os
        import time

        if int(os.environ["RANK"]) == rank:
            fail()
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RenkeiError) as caught:
        run(body, 3)
    assert time.monotonic() - begin < HANG
    return caught.value


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_names_its_rank_and_has_its_traceback_once(rank: int) -> None:
    def fail() -> None:
        raise ZeroDivisionError("boom")

    error = fail_on(rank, fail)
    assert isinstance(error, RankFailedError)
    assert error.rank == rank
    assert str(error).startswith(f"rank {rank} failed: ZeroDivisionError: boom\nTraceback")
    assert str(error).count("Traceback") == 1
    assert error.traceback_text.splitlines()[-2].endswith("in fail")
    assert "renkei/launch/child.py" not in error.traceback_text.splitlines()[1]


SILENT_ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "sys.exit": (lambda: sys.exit(3), "exited with code 3"),
    "os._exit": (lambda: os._exit(4), "exited with code 4"),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by signal 9 (SIGKILL)"),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ended by signal 11 (SIGSEGV)"),
    "real-time signal": (lambda: os.kill(os.getpid(), 40), "ended by signal 40"),
}


@pytest.mark.parametrize("how", SILENT_ENDS)
def test_a_rank_that_ends_without_a_word_is_named(how: str) -> None:
    end, words = SILENT_ENDS[how]
    rank = len(how) % 2
    error = fail_on(rank, end)
    assert isinstance(error, RankFailedError)
    assert error.rank == rank
    assert f"rank {rank} failed: {words}" in str(error)


def test_the_last_words_of_a_rank_that_ends_are_told() -> None:
    def fail() -> None:
        print("last words of rank", os.environ["RANK"], file=sys.stderr, flush=True)
        os._exit(4)

    assert "last words of rank 2" in str(fail_on(2, fail))


@pytest.mark.parametrize(("code", "told"), [("'I give up'", "I give up"), ("3", "code 3"), ("0", "exit code 0")])
def test_a_rank_that_leaves_early_is_named_and_not_the_one_it_leaves(code: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(
        "import atexit, sys, time, torch, renkei\n"
        "atexit.register(time.sleep, 2.0)  # after the connections are closed: long in leaving\n"
        "comm = renkei.create_communicator(timeout=20)\n"
        f"if comm.rank == 1: sys.exit({code})\n"
        "comm.all_reduce(torch.zeros(3))\n"
    )
    failure = launch(["script", str(script)], 2)
    assert failure is not None
    assert failure.rank == 1
    assert told in str(failure)


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_usage_is_wrong_usage_here_too(rank: int) -> None:
    def fail() -> None:
        raise UsageError("what, why, and the fix")

    error = fail_on(rank, fail)
    assert type(error) is UsageError
    assert str(error) == "what, why, and the fix"


def test_leaving_without_a_result_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match="rank 1 ended without a result") as caught:
        run(lambda: sys.exit(0) if os.environ["RANK"] == "1" else None, 2)
    assert caught.value.rank == 1


def test_a_result_that_can_not_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed: .*pickle"):
        run(threading.Lock, 1)


def test_a_rank_that_ignores_sigterm_is_ended() -> None:
    def body() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "0":
            time.sleep(0.5)  # by then rank 1 ignores it
            raise ZeroDivisionError
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 0 failed: ZeroDivisionError"):
        run(body, 2)
    assert time.monotonic() - begin < HANG


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    def body(folder: Path) -> None:
        child = subprocess.Popen(["sleep", "60"])
        (folder / os.environ["RANK"]).write_text(str(child.pid))

    run(body, 2, tmp_path)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert leaks.eventually_ended(pids)


class Ending:
    """A process that is seen to end, with `code`, when it has been looked at `looks` times."""

    returncode: int | None = None

    def __init__(self, code: int, looks: int) -> None:
        self._code, self._looks = code, looks

    def poll(self) -> int | None:
        self._looks -= 1
        if self._looks < 0:
            self.returncode = self._code
        return self.returncode


@pytest.mark.parametrize(
    ("code", "cause"), [(-signal.SIGKILL, 1), (-signal.SIGSEGV, 1), (-signal.SIGABRT, 0), (1, 0), (0, 0)]
)
def test_a_rank_that_was_killed_is_the_cause_though_another_tells_of_it_first(
    code: int, cause: int, tmp_path: Path
) -> None:
    write(Failure(0, time.time() + 0.1, "RuntimeError: closed by peer", "", 1), tmp_path)  # after all was well
    ranks: list[Any] = [Ending(1, 1), Ending(code, 12)]
    failure = local._wait(ranks, tmp_path, tmp_path)
    assert failure is not None
    assert failure.rank == cause


# -- scripts ------------------------------------------------------------------------------------------------------


def launch_script(folder: Path, code: str, size: int, *arguments: str) -> Failure | None:
    script = folder / "script.py"
    script.write_text(code)
    return launch(["script", str(script), *arguments], size, log_dir=folder / "logs")


def test_a_script_runs_as_by_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("value = 5\n")
    code = "import os, sys, beside\nprint(os.environ['RANK'], __name__, sys.argv[1:], beside.value)\n"
    assert launch_script(tmp_path, code, 2, "--epochs", "3") is None
    line = "__main__ ['--epochs', '3'] 5\n"
    assert capfd.readouterr().out == f"0 {line}"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == f"1 {line}"


def test_a_module_runs_as_by_python(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_program.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    assert launch(["module", "a_program", "x"], 1) is None
    assert capfd.readouterr().out == "__main__ ['x']\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scripts_failure_is_returned_and_not_also_on_the_console(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"import os, time\nif os.environ['RANK'] == '{rank}':\n    1 / 0\ntime.sleep(60)\n"
    failure = launch_script(tmp_path, code, 2)
    assert failure is not None
    assert (failure.rank, failure.summary) == (rank, "ZeroDivisionError: division by zero")
    assert failure.details.count("Traceback") == 1
    assert 'script.py", line 3' in failure.details
    assert "child.py" not in failure.details
    assert "Traceback" not in capfd.readouterr().err


def test_a_script_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    failure = launch(["script", str(tmp_path / "nothing.py")], 1)
    assert failure is not None
    assert "nothing.py" in failure.summary


# -- red twins ----------------------------------------------------------------------------------------------------


def test_red_twin_a_launcher_that_does_not_end_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.take_snapshot()
    kept: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(local, "_end", kept.extend)
    with pytest.raises(RankFailedError):
        run(lambda: 1 / 0 if os.environ["RANK"] == "0" else time.sleep(60), 2)
    (left,) = leaks.find_leaks(before, patience=0.3)
    assert left.startswith("process")
    leaks.end_children(before)
    for rank in kept:
        rank.wait()


def test_red_twin_the_latest_failure_taken_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "first_cause", lambda failures: max(failures, key=lambda failure: failure.rank))
    monkeypatch.setattr(local, "_LAST_WORDS", 2.0)

    def body() -> None:
        time.sleep(0.5 * int(os.environ["RANK"]))
        raise ZeroDivisionError

    with pytest.raises(RankFailedError) as caught:
        run(body, 2)
    assert caught.value.rank == 1
