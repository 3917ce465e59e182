"""Progress is shown by rank 0 alone: as plain lines, or as one line that lives where there is a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from renkei.communicators.communicator import Communicator
from renkei.report import progress
from renkei.report.progress import create_display, describe, describe_evaluation
from renkei.testing import run_on_ranks
from renkei.training.trainer import Progress

SOME = Progress(
    epoch=1.25,
    step=40,
    learning_rate=0.05,
    means={"loss": 0.43219, "top1": 0.8765},
    samples_per_second=12345.6,
    step_ms={"data": [0.4], "computing": [70.0], "communication": [17.3], "waiting": [12.3]},
    shares={"data": 0.004, "computing": 0.7, "communication": 0.173, "waiting": 0.123},
)
RESULT = {"loss": 0.51, "top1": 0.25}
NUMBERS = "loss 0.4322  top-1 0.876  12,346 samples/s  70% computing  17% communication  12% waiting"
EVALUATION = "epoch 2 of 3  evaluation: loss 0.5100  top-1 0.2500"


def show(comm: Communicator) -> None:
    with create_display(comm, num_epochs=3) as display:
        display.progress(SOME)
        display.evaluation(2, RESULT)


def check_shown_once(shown: str) -> None:
    assert shown.count(EVALUATION) == 1


def test_the_numbers_that_matter_are_in_one_line() -> None:
    assert describe(SOME) == NUMBERS
    assert describe_evaluation(2, 3, RESULT) == EVALUATION


def test_numbers_that_are_none_are_shown_as_well() -> None:
    broken = Progress(0.0, 1, 0.1, {"loss": float("nan"), "top1": float("nan")}, float("inf"), {}, {"data": 0.0})
    assert describe(broken) == "loss nan  top-1 nan  inf samples/s"


def test_where_there_is_no_terminal_lines_are_plain_and_not_too_many(capfd: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(1, show)
    assert capfd.readouterr() == ("", f"{EVALUATION}\n")


def test_once_it_is_time_progress_is_a_plain_line_too(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_EVERY", 0.0)
    run_on_ranks(1, show)
    assert capfd.readouterr() == ("", f"epoch 1.25 of 3  {NUMBERS}\n{EVALUATION}\n")


@pytest.mark.parametrize("size", [2, 3])
def test_only_rank_0_shows_anything(capfd: pytest.CaptureFixture[str], size: int) -> None:
    run_on_ranks(size, show)
    out, err = capfd.readouterr()
    check_shown_once(err)
    assert out == ""


def test_on_a_terminal_one_line_lives_and_evaluations_stay_above_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, legacy_windows=False)
    with progress._bar(console) as bar:
        display = progress._Live(bar, num_epochs=3)
        display.progress(SOME)
        bar.refresh()
        display.evaluation(2, RESULT)
    drawn = re.split("[\r\n]+", re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", console.file.getvalue()))
    assert any(line.startswith("epoch 1.2 of 3 ") and f" 42% 0:00:00 {NUMBERS}" in line for line in drawn)
    assert EVALUATION in drawn
    last = list(filter(None, drawn))[-1]
    assert last.startswith("epoch 2.0 of 3 ")
    assert f" 67% 0:00:00 {NUMBERS}" in last


def test_what_lives_is_on_standard_error(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, any stream is a terminal now
    monkeypatch.setenv("COLUMNS", "140")
    run_on_ranks(2, show)
    out, err = capfd.readouterr()
    assert out == ""
    assert "\x1b[" in err
    check_shown_once(err)


def test_red_twin_every_rank_shows_its_own(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_Silent", lambda: progress._Plain(3))
    run_on_ranks(2, show)
    with pytest.raises(AssertionError):
        check_shown_once(capfd.readouterr().err)
