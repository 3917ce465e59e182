"""Results as a table, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PLAIN_WIDTH = 200  # columns; a file has as many as are needed, and no line is to be broken


def as_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The rows under their heads, which may be of several lines on a terminal; elsewhere each is one line."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if console.is_terminal:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    else:
        table = Table(box=None)
        console.width = _PLAIN_WIDTH
    for head in heads:
        head = head if console.is_terminal else head.replace("\n", " ")
        table.add_column(head, overflow="fold")  # nothing is left out where the terminal is narrow
    for row in rows:
        table.add_row(*row)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
