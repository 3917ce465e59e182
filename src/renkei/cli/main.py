"""``renkei``: finds the command, and turns errors into a line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import typer

import renkei
from renkei.cli.bench import bench
from renkei.cli.launch import launch
from renkei.cli.train import train
from renkei.errors import UsageError
from renkei.failures.first_cause import JOB_VARIABLE, report

_INTERRUPTED = 128 + signal.SIGINT  # what typer, too, makes of a KeyboardInterrupt

app = typer.Typer(
    name="renkei",
    help="Distributed deep learning on PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(launch)
app.add_typer(bench, name="bench")


def show_version(value: bool) -> None:
    """Print the version and exit."""
    if value:
        print(renkei.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Print the version."),
) -> None:
    """Distributed deep learning on PyTorch."""


def main() -> NoReturn:
    """Run the command the process's arguments name, and exit."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        message = error.format_message().rstrip(".") or "no command is given"
        sys.exit(report(UsageError(f"{message}{hint}")))
    except UsageError as error:
        sys.exit(report(error))
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except Exception as error:
        if JOB_VARIABLE in os.environ:  # its launcher tells
            raise
        sys.exit(report(error))
    if code == _INTERRUPTED:
        print("renkei: interrupted", file=sys.stderr)
    sys.exit(code)
