"""Commands that run on several ranks: start them, or take part if a launcher already has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from renkei.errors import UsageError
from renkei.failures.first_cause import Failure
from renkei.launch.environments import detect
from renkei.launch.local import launch

NumRanks = Annotated[
    int | None, typer.Option("-n", "--num-ranks", min=1, help="Start this many ranks here.", show_default="1")
]


def is_to_start(num_ranks: int | None) -> bool:
    """Whether this process is to start `num_ranks` ranks, and not to be one.

    Raises:
        UsageError: a launcher has started another number.
    """
    environment = detect(os.environ)
    if not environment.is_distributed:
        return num_ranks is not None and num_ranks > 1
    if num_ranks not in (None, environment.size):
        size = environment.source[1]
        raise UsageError(
            f"-n {num_ranks}, but {size}={environment.size}: that many ranks have been started already; leave -n out, "
            f"or unset {size} if it is left over"
        )
    return False


def start_this_command(num_ranks: int, extra: list[str], log_dir: Path | None = None) -> None:
    """Run this process's own command line, with `extra` after the command, on new ranks; exits if one fails."""
    command, *rest = sys.argv[1:]
    exit_if_failed(launch(["module", "renkei", command, *extra, *rest], num_ranks, log_dir=log_dir))


def exit_if_failed(failure: Failure | None) -> None:
    """If a rank has failed, tell why and exit, with 2 for wrong usage and 1 for anything else."""
    if failure is not None:
        print(failure, file=sys.stderr)
        raise typer.Exit(2 if failure.exit_code == 2 else 1)
