"""``renkei launch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from renkei.errors import UsageError
from renkei.launch import local
from renkei.training.run_dir import create


def launch(
    script: Annotated[str, typer.Argument(help="A Python script, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", help="How many ranks to start here.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for what ranks other than 0 write.", show_default="dropped if all is well"),
    ] = None,
) -> None:
    """Run a script on several ranks of this host; if one fails, all end, and its traceback is shown once."""
    if num_ranks < 1:
        raise UsageError(f"-n {num_ranks}: the number of ranks must be at least 1")
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no script {script}; give its path, or -m for a module")
    if log_dir is not None:
        create(log_dir)
    failure = local.launch(["module" if module else "script", script, *(arguments or [])], num_ranks, log_dir=log_dir)
    if failure is not None:
        print(failure, file=sys.stderr)
        raise typer.Exit(2 if failure.exit_code == 2 else 1)
