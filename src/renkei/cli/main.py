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
from renkei.cli.output import OutputLostError, guard_standard_output, show
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
        show(renkei.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Print the version."),
) -> None:
    """Distributed deep learning on PyTorch."""


def main() -> NoReturn:
    """Run the command the process's arguments name, and exit."""
    guard_standard_output()
    try:
        code = _run()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        message = error.format_message().rstrip(".") or "no command is given"
        code = report(UsageError(f"{message}{hint}"))
    except OutputLostError as error:
        code = _report_lost(error)
    except UsageError as error:
        code = report(error)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except Exception as error:
        if JOB_VARIABLE in os.environ:  # its launcher tells
            raise
        code = report(error)
    if code == _INTERRUPTED:
        print("renkei: interrupted", file=sys.stderr)
    sys.exit(code)


def _run() -> int:
    """Run the command; returns its exit code, when all that it has printed is written."""
    try:
        code: int = app(standalone_mode=False)
    except SystemExit as leaving:  # of a broken pipe, a socket's too, typer makes an exit without a word
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _report_lost(error: OutputLostError) -> int:
    if JOB_VARIABLE in os.environ:
        return report(error)
    print(f"renkei: {error}", file=sys.stderr)
    return error.exit_code
