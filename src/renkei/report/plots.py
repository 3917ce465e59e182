"""Figures of measurements."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from renkei.bench.bandwidth import COPY, AllReduceTime
from renkei.bench.sizes import show_size
from renkei.errors import UsageError
from renkei.writable import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which colour-blind people can tell apart (https://jfly.uni-koeln.de/color/); without yellow,
# which is faint on white. Renkei's communicators get them from the first on, peers from the last on.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
_GREY = "#666666"
_WIDTH, _HEIGHT, _LEGEND = 6.0, 4.6, 1.8  # inches; of a panel, and beside all
_COLUMNS = 2  # of panels
_FEW_DECADES = 3  # in which there is room for labels between powers of ten
_LABELS = 7  # sizes that have room on an axis


def check(path: Path) -> None:
    """Raise `UsageError` unless a figure can be drawn into this file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"drawing needs matplotlib, which doesn't load ({error}); pip install 'renkei[report]'"
        ) from None
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"figure {path}: its kind can't be told; let its name end in {', '.join(FORMATS)}")
    check_writable("figure", path)


def draw_all_reduce(panels: Mapping[str, Sequence[AllReduceTime]], path: Path, *, subtitle: str) -> None:
    """Draw the time of a sum by the size of the buffer: a panel for each title, in it a line for each contestant.

    Bands reach from the lower to the upper quartile.

    Raises:
        UsageError: there is no matplotlib, or the file can't be written.
    """
    check(path)
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_WIDTH * columns + _LEGEND, _HEIGHT * rows), layout="constrained")
    figure.suptitle(f"All-reduce: time to add a buffer over ranks\n{subtitle}", fontsize=11)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    lines = _lines(result for results in panels.values() for result in results)
    for axes, (title, results) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, title, results, lines)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("median time and quartiles, ms")
    _add_legend(figure, lines)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"figure {path} can't be written: {error.strerror}") from None


def _lines(results: Iterable[AllReduceTime]) -> dict[str, dict[str, Any]]:
    """By contestant, how its line is drawn: alike in all panels."""
    names = {result.name: result for result in results}
    ours, peers = list(COLOURS), list(reversed(COLOURS))
    lines: dict[str, dict[str, Any]] = {}
    for name, result in names.items():
        if name == COPY:
            lines[name] = {"color": _GREY, "linestyle": "--", "marker": "_"}  # seen also where it is one point
            continue
        is_ours = result.backend is not None
        colours = ours if is_ours else peers
        colours.append(colours.pop(0))
        lines[name] = {
            "color": colours[-1],
            "linestyle": "-" if is_ours else ":",
            "marker": MARKERS[len(lines) % len(MARKERS)],
            "markerfacecolor": colours[-1] if is_ours else "white",
        }
    return lines


def _draw_panel(
    axes: Axes, title: str, results: Sequence[AllReduceTime], lines: Mapping[str, Mapping[str, Any]]
) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    for name, line in lines.items():
        own = sorted((result for result in results if result.name == name), key=lambda result: result.bytes)
        sizes = [result.bytes for result in own]
        low, high = ([result.quartiles_ms[end] for result in own] for end in (0, 1))
        axes.plot(sizes, [result.median_ms for result in own], linewidth=1.8, markersize=6, **line)
        axes.fill_between(sizes, low, high, color=line["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_spaced({result.bytes for result in results})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(round(size))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if _decades(results) < _FEW_DECADES else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda milliseconds, _: f"{milliseconds:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=9, labelleft=True)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("buffer on each rank")


def _decades(results: Sequence[AllReduceTime]) -> float:
    """How many powers of ten the times reach over."""
    return math.log10(
        max(result.quartiles_ms[1] for result in results) / min(result.quartiles_ms[0] for result in results)
    )


def _spaced(sizes: Collection[int]) -> list[int]:
    """Those sizes that can be labelled without running into one another."""
    nearest = math.log(max(sizes) / min(sizes)) / _LABELS
    chosen: list[int] = []
    for size in sorted(sizes):
        if not chosen or math.log(size / chosen[-1]) >= nearest:
            chosen.append(size)
    return chosen


def _add_legend(figure: Figure, lines: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=1.8, **line) for line in lines.values()]
    labels = ["copy of as many bytes" if name == COPY else name for name in lines]
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=10)
