"""The commands that need no torch don't wait for it, and `--print-config` tells where each setting comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import renkei
from multiprocess.commands import RENKEI, Outcome, check_json_alone, run, run_unread, strictly, train
from needs import linux
from renkei.failures import first_cause

# Runs a command line as `renkei` does, and says at the end of standard error whether torch was loaded.
FRESH = """
import sys
from renkei.cli.main import main
sys.argv = ["renkei", *sys.argv[1:]]
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def check_without_torch(outcome: Outcome, code: int = 0) -> None:
    assert outcome.code == code
    assert outcome.err.splitlines()[-1] == "False"


def in_a_fresh_interpreter(*command: str, cwd: Path, program: str = FRESH) -> Outcome:
    return run(sys.executable, "-c", program, *command, cwd=cwd)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--help", "train"),
        ("train --help", "--print-config"),
        ("launch --help", "--log-dir"),
        ("bench --help", "step"),
        ("bench step --help", "--peers"),
        ("--version", renkei.__version__),
        ("train --print-config", "global_batch_size"),
    ],
)
def test_torch_is_not_loaded_by(tmp_path: Path, command: str, shown: str) -> None:
    outcome = in_a_fresh_interpreter(*command.split(), cwd=tmp_path)
    check_without_torch(outcome)
    assert shown in outcome.out


def test_torch_is_not_loaded_to_refuse(tmp_path: Path) -> None:
    check_without_torch(in_a_fresh_interpreter("train", "--set", "epoch=1", cwd=tmp_path), code=2)


def test_red_twin_help_that_loads_torch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_without_torch(in_a_fresh_interpreter("--help", cwd=tmp_path, program=f"import torch\n{FRESH}"))


def test_without_a_command_help_is_shown_and_that_is_wrong_usage(tmp_path: Path) -> None:
    outcome = run(RENKEI, cwd=tmp_path)
    assert outcome.code == 2
    assert "Usage: renkei" in outcome.out
    assert outcome.err == "renkei: no command is given; see renkei --help\n"


# -- --print-config -----------------------------------------------------------------------------------------------

GIVEN = ("digits", "--config", "some.yaml", "--set", "epochs=7", "--data", ".", "--print-config")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some.yaml").write_text("epochs: 6\nseed: 5\n")
    return tmp_path


def test_print_config_tells_where_each_setting_comes_from(folder: Path) -> None:
    outcome = train(*GIVEN, cwd=folder)
    assert outcome.code == 0
    assert outcome.err == ""
    lines = [line.split() for line in outcome.out.splitlines()]
    for expected in (
        ["epochs", "7", "--set"],
        ["seed", "5", "some.yaml"],
        ["data", '"."', "--data"],
        ["global_batch_size", "64", "recipe"],
        ["micro_batch_size", "null", "recipe"],
    ):
        assert expected in lines
    assert not (folder / "runs").exists()


def test_print_config_is_one_json_object_if_asked_for(folder: Path) -> None:
    found = check_json_alone(train(*GIVEN, "--json", cwd=folder))
    assert set(found) == {"settings", "sources"}
    assert set(found["settings"]) == set(found["sources"])
    assert (found["settings"]["epochs"], found["sources"]["epochs"]) == (7, "--set")


# -- standard output that takes nothing, or not everything --------------------------------------------------------

LOST = "standard output was closed by its reader before all was written"


def check_told_that_output_is_lost(outcome: Outcome, reason: str) -> None:
    assert outcome.code == 1
    assert outcome.err == f"renkei: {reason}\n"


@pytest.mark.parametrize("command", ["train --print-config", "train --print-config --json", "bench --help"])
def test_output_that_nobody_reads_is_told_in_one_line(tmp_path: Path, command: str) -> None:
    check_told_that_output_is_lost(run_unread(RENKEI, *command.split(), cwd=tmp_path), LOST)


@linux
def test_a_full_disk_and_output_that_is_closed_are_told_in_one_line(tmp_path: Path) -> None:
    for where, reason in (
        (">/dev/full", "standard output can't be written to: No space left on device"),
        (">&-", "standard output is closed, so the result is lost"),
    ):
        outcome = run("sh", "-c", f"{RENKEI} train --print-config {where}", cwd=tmp_path)
        check_told_that_output_is_lost(outcome, reason)


def test_a_rank_whose_output_nobody_reads_tells_its_launcher(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    job = {"RENKEI_JOB": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    outcome = run_unread(RENKEI, "--version", cwd=tmp_path, **place, **job)
    assert outcome == Outcome(1, "", "")
    (failure,) = first_cause.read_all(tmp_path)
    assert (failure.summary, failure.details, failure.exit_code) == (LOST, "", 1)


def test_letters_that_the_output_lacks_are_escaped(folder: Path) -> None:
    (folder / "some.yaml").rename(folder / "größe.yaml")
    outcome = train("--config", "größe.yaml", "--print-config", cwd=folder, PYTHONIOENCODING="ascii")
    assert outcome.code == 0, outcome.err
    assert ["seed", "5", r"gr\xf6\xdfe.yaml"] in [line.split() for line in outcome.out.splitlines()]


UNGUARDED = FRESH.replace("sys.argv =", "import renkei.cli.main as cli; cli.guard_standard_output = int; sys.argv =")


def test_red_twin_output_that_nobody_guards(tmp_path: Path) -> None:
    command = (sys.executable, "-c", UNGUARDED, "bench", "--help")
    with pytest.raises(AssertionError):
        check_told_that_output_is_lost(run_unread(*command, cwd=tmp_path), LOST)


# -- renkei.run ---------------------------------------------------------------------------------------------------

SCRIPT = """
import json
import renkei

def ranks(greeting):
    import torch
    with renkei.create_communicator() as comm:
        print(greeting, comm.rank, flush=True)
        return [comm.rank, comm.size, float(comm.all_reduce(torch.tensor(1.0 + comm.rank)))]

if __name__ == "__main__":
    print(json.dumps(renkei.run(ranks, 3, "here is rank")))
"""


def test_renkei_run_in_a_script_gives_results_by_rank_and_shows_what_rank_0_prints(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    outcome = run(sys.executable, "script.py", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    first, last = outcome.out.splitlines()
    assert first == "here is rank 0"
    assert strictly(last) == [[0, 3, 6.0], [1, 3, 6.0], [2, 3, 6.0]]
