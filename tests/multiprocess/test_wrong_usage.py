"""What a user gets wrong is told in one line that says what to do, with exit code 2, and nothing is left behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import typer

from multiprocess.commands import RENKEI, Outcome, check_json_alone, check_refused, run, train, without_announcements
from renkei.cli.train import _folder
from unit.data import idx_files

ONE_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

MISTAKES: dict[str, tuple[list[str], str]] = {
    "an unknown command": (["trian"], "No such command 'trian'. Did you mean 'train'?"),
    "an unknown recipe": (["train", "digit"], "recipe 'digit' is unknown; did you mean 'digits'?"),
    "a recipe that is like none": (["train", "imagenet"], "known are digits, fashion-mnist"),
    "an argument too many": (["train", "digits", "more"], "Got unexpected extra argument(s) (more)"),
    "an unknown setting": (["train", "--set", "epoch=3"], "'epoch' is unknown; did you mean 'epochs'?"),
    "a value that can't be": (["train", "--set", "epochs=0"], "epochs=0 (from --set): input should be greater"),
    "a value that is none": (["train", "--set", "epochs=yes"], "epochs=yes (from --set): input should be a valid"),
    "no value": (["train", "--set", "epochs"], "must be name=value, as in --set epochs=10"),
    "no communicator": (
        ["train", "-n", "2", "--set", "communicator=falt"],
        "communicator=falt (from --set): communicator 'falt' is unknown; did you mean 'flat'?",
    ),
    "no file": (["train", "--config", "nowhere.yaml"], "config file nowhere.yaml: No such file or directory"),
    "no folder": (
        ["train", "fashion-mnist", "--data", "nowhere"],
        "data=nowhere (from --data): there is no such folder",
    ),
    "a run folder in a file": (["train", "-n", "2", "--run-dir", "/dev/null/x"], "folder /dev/null/x can't be written"),
    "a folder for logs where nothing can be made": (
        ["launch", "--log-dir", "/proc", __file__],
        "folder /proc can't be written to: ",
    ),
    "no ranks": (["train", "-n", "0"], "'-n' / '--num-ranks': Input should be greater than or equal to 1"),
    "fewer": (["bench", "step", "-n", "-2"], "'--num-ranks': Input should be greater than or equal to 1"),
    "no number": (["train", "-n", "x"], "Invalid value for '-n'"),
    "an unknown option": (["train", "--epochs", "3"], "No such option: --epochs"),
    "no script": (
        ["launch", "-n", "2", "nowhere.py"],
        "there is no script nowhere.py; give its path, or -m for a module",
    ),
    "a script on no ranks": (["launch", "-n", "0", "nowhere.py"], "Input should be greater than or equal to 1"),
    "an unknown peer": (["bench", "step", "--peers", "dpp"], "peer 'dpp' is unknown; did you mean 'ddp'?"),
    "an unknown model": (["bench", "step", "--models", "resnet"], "model 'resnet' is unknown"),
    "no models": (["bench", "step", "--models", ""], "--models names none"),
    "no rounds": (["bench", "step", "--rounds", "0"], "'--rounds': Input should be greater than or equal to 1"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_it_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    command, reason = MISTAKES[kind]
    check_refused(run(RENKEI, *command, cwd=tmp_path), reason)
    assert not list(tmp_path.iterdir())


def test_a_config_file_that_is_a_list_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("- epochs\n- seed\n")
    check_refused(
        train("--config", "settings.yaml", cwd=tmp_path), "config file settings.yaml must hold names and values"
    )


def test_another_number_of_ranks_than_the_launcher_has_started_is_told_in_one_line(tmp_path: Path) -> None:
    outcome = train("-n", "3", cwd=tmp_path, **ONE_OF_TWO)
    check_refused(outcome, "-n 3, but WORLD_SIZE=2", "leave -n out, or unset WORLD_SIZE")


def test_a_folder_that_holds_another_runs_records_is_told_in_one_line_and_they_stay(tmp_path: Path) -> None:
    for name in ("run.json", "rank-1.log"):
        (tmp_path / name).write_text("{}")
    check_refused(train("-n", "2", "--run-dir", ".", cwd=tmp_path), ". holds another run's records; choose another")
    assert [(path.name, path.read_text()) for path in sorted(tmp_path.iterdir())] == [
        ("rank-1.log", "{}"),
        ("run.json", "{}"),
    ]


def test_damaged_data_is_told_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    data = idx_files.write(tmp_path / "data", 50, 20, zipped=True)
    damaged = data / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    check_refused(train("fashion-mnist", "-n", "2", "--data", str(data), cwd=tmp_path), str(damaged), "can't be read")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_without_scikit_learn_there_are_no_digits_and_that_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError\n")
    outcome = train("digits", "-n", "2", cwd=tmp_path, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    check_refused(outcome, "the digits come with scikit-learn; pip install scikit-learn")
    assert [path.name for path in tmp_path.iterdir()] == ["sklearn.py"]


@pytest.mark.parametrize(
    ("code", "has_begun", "is_left"), [(2, False, False), (2, True, True), (1, False, True), (130, False, True)]
)
def test_only_what_was_refused_before_it_began_leaves_no_folder(
    tmp_path: Path, code: int, has_begun: bool, is_left: bool
) -> None:
    def start() -> None:
        with _folder(tmp_path / "runs" / "one") as folder:
            (folder / "rank-1.log").write_text("")
            if has_begun:
                (folder / "run.json").write_text("{}")
            raise typer.Exit(code)

    with pytest.raises(typer.Exit):
        start()
    assert (tmp_path / "runs").exists() == is_left
    assert (tmp_path / "runs" / "one" / "rank-1.log").exists() == is_left


DIFFERENT_MODELS = """
import torch, renkei
comm = renkei.create_communicator()
model = torch.nn.Linear(3, 2 + comm.rank)
renkei.MultiNodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
"""

ONE_FAILS = """
import torch, renkei
comm = renkei.create_communicator()
if comm.rank == 1:
    raise FloatingPointError("something went wrong here")
comm.all_reduce(torch.ones(3))
"""


def launched(script: str, num_ranks: int, cwd: Path) -> Outcome:
    (cwd / "script.py").write_text(script)
    return run(RENKEI, "launch", "-n", str(num_ranks), "script.py", cwd=cwd)


def test_ranks_with_different_models_are_told_so_in_one_line(tmp_path: Path) -> None:
    outcome = launched(DIFFERENT_MODELS, 2, tmp_path)
    assert outcome.code == 2
    (line,) = without_announcements(outcome.err)
    assert line.startswith("renkei: rank 1 has ")
    assert "float32[3, 3]" in line
    assert "float32[2, 3]" in line
    assert line.endswith("build the same model and optimizer on every rank")


def test_a_failure_is_no_wrong_usage_its_traceback_is_shown_once_and_the_rank_named_last(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = launched(ONE_FAILS, 3, tmp_path)
    assert time.monotonic() - began < 40  # and not the minutes that a wait for another rank may last
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("Traceback") == 1
    assert outcome.err.count("script.py") == 1
    last = outcome.err.splitlines()[-1]
    assert last.startswith("first cause: rank 1 on ")
    assert last.endswith(": FloatingPointError: something went wrong here")


# -- the checks see what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(1, "", "renkei: no\n"),
        Outcome(2, "{}", "renkei: no\n"),
        Outcome(2, "", "renkei: no\nand more\n"),
        Outcome(2, "", ""),
        Outcome(2, "", "Traceback (most recent call last): no\n"),
        Outcome(2, "", "renkei: something else\n"),
    ],
    ids=["exit code 1", "something on standard output", "two lines", "none", "a traceback", "another reason"],
)
def test_red_twin_a_mistake_that_is_told_with(outcome: Outcome) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_refused(outcome, "no")


def test_red_twin_json_that_is_preceded_by_another_line() -> None:
    check_json_alone(Outcome(0, '{"top1": 1}\n', ""))
    for out in ('epoch 1\n{"top1": 1}\n', '{"top1": 1}\ndone\n', '{"top1": NaN}\n', "[1]\n", ""):
        with pytest.raises((AssertionError, ValueError)):
            check_json_alone(Outcome(0, out, ""))
