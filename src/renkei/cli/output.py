"""Results on standard output, and what happens if they can't get there."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from renkei.errors import UsageError


class OutputLostError(UsageError):
    """Standard output doesn't take the result. Told in one line, as mistakes are; but the work has been done."""

    exit_code = 1


def show(text: str) -> None:
    """Print a result, at once.

    Raises:
        OutputLostError: standard output is closed or full.
    """
    if sys.stdout is None:  # was closed before this process began
        raise OutputLostError("standard output is closed, so the result is lost")
    print(text, flush=True)


def guard_standard_output() -> None:
    """Let `OutputLostError` tell, whoever prints, that standard output is closed or full.

    Letters that its encoding lacks, in the name of a folder, say, are written as escapes and are no error.
    """
    if sys.stdout is not None:
        raw = _Told(sys.stdout.fileno(), "wb", closefd=False)
        is_terminal, encoding = sys.stdout.isatty(), sys.stdout.encoding
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=is_terminal
        )


class _Told(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # what waits in buffers would fail again, with a traceback, when the interpreter ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            # not an OSError, of which typer would make an exit without a word
            if isinstance(error, BrokenPipeError):
                raise OutputLostError("standard output was closed by its reader before all was written") from None
            raise OutputLostError(f"standard output can't be written to: {error.strerror}") from None
