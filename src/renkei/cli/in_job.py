"""Commands that run on several ranks: start them, or take part if a launcher already has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from renkei.errors import UsageError
from renkei.launch.environments import detect
from renkei.launch.local import launch


def is_to_start(num_ranks: int | None) -> bool:
    """Whether this process is to start `num_ranks` ranks, and not to be one.

    Raises:
        UsageError: the number is impossible, or a launcher has started another number.
    """
    if num_ranks is not None and num_ranks < 1:
        raise UsageError(f"-n {num_ranks}: the number of ranks must be at least 1")
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
    failure = launch(["module", "renkei", command, *extra, *rest], num_ranks, log_dir=log_dir)
    if failure is not None:
        print(failure, file=sys.stderr)
        raise typer.Exit(2 if failure.exit_code == 2 else 1)
