"""``renkei launch``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from renkei.cli.in_job import exit_if_failed
from renkei.errors import UsageError
from renkei.launch import local
from renkei.training.run_dir import create


def launch(
    script: Annotated[str, typer.Argument(help="A Python script, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="How many ranks to start here.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for what ranks other than 0 write.", show_default="dropped if all is well"),
    ] = None,
) -> None:
    """Run a script on several ranks of this host; if one fails, all end, and its traceback is shown once."""
    if not module and not os.path.isfile(script):
        raise UsageError(f"there is no script {script}; give its path, or -m for a module")
    if log_dir is not None:
        create(log_dir)
    command = ["module" if module else "script", script, *(arguments or [])]
    exit_if_failed(local.launch(command, num_ranks, log_dir=log_dir))
