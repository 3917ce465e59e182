"""How far a measurement has come, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def turns_bar(num_turns: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """What is to be called after each turn; the bar is there as long as this is open."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    console = Console(stderr=True, force_terminal=True)  # mpiexec passes it on to one
    columns = ("measuring", BarColumn(bar_width=40), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=num_turns)
        yield lambda: bar.advance(task)
