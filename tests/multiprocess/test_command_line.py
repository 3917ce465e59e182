"""The commands that need no torch don't wait for it, and `--print-config` tells where each setting comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import renkei
from multiprocess.commands import RENKEI, Outcome, check_json_alone, run, strictly, train

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
