"""Running commands as a user does, and checking what they print, leave and exit with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RENKEI = str(Path(sys.executable).with_name("renkei"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PATIENCE = 50.0  # seconds; generous, below the timeout of a test


@dataclass(frozen=True)
class Outcome:
    """What a command has done."""

    code: int
    out: str
    err: str


def run(*command: str, cwd: Path, **variables: str) -> Outcome:
    """Run a command to its end, in a folder of its own, with more environment variables."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_unread(*command: str, cwd: Path, **variables: str) -> Outcome:
    """Run a command whose standard output nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | variables,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    return Outcome(done.returncode, "", done.stderr)


def train(*arguments: str, cwd: Path, **variables: str) -> Outcome:
    return run(RENKEI, "train", *arguments, cwd=cwd, **variables)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What the condition says, as soon as it says something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} after {PATIENCE} s"
        time.sleep(0.05)
    return found


def strictly(text: str) -> Any:
    """Read JSON as a reader does that knows no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# -- checks -------------------------------------------------------------------------------------------------------


def check_json_alone(outcome: Outcome) -> dict[str, Any]:
    """The command has done what it was to do, and one JSON object is all there is on standard output."""
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    (line,) = outcome.out.splitlines()
    found = strictly(line)
    assert isinstance(found, dict)
    return found


def check_refused(outcome: Outcome, *reasons: str) -> None:
    """The user's mistake is told in one line of standard error, and nothing was done."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("renkei: ")
    for reason in reasons:
        assert reason in line


def without_announcements(text: str) -> list[str]:
    """The lines of standard error but for those in which rank 0 says how the job is set up."""
    return [line for line in text.splitlines() if not (line.startswith("renkei: ") and " ranks" in line)]
