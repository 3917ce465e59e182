"""Figures: drawn into the file asked for, readable at any number of contestants, refused before they are needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from renkei.bench.bandwidth import COPY, AllReduceTime
from renkei.errors import UsageError
from renkei.report import plots
from renkei.report.plots import check, draw_all_reduce

PNG = b"\x89PNG\r\n\x1a\n"


def result(communicator: str, backend: str | None, size: int, milliseconds: float) -> AllReduceTime:
    quartiles = (0.9 * milliseconds, 1.3 * milliseconds)
    return AllReduceTime(communicator, backend, "float32", size, milliseconds, quartiles, 1.0, 0.5, None)


def results(sizes: list[int]) -> list[AllReduceTime]:
    takes = {("flat", "gloo"): 4.0, ("flat", "shared_memory"): 1.5, ("gloo", None): 5.0, (COPY, None): 1.0}
    return [result(*who, size, each * size / 2**20) for who, each in takes.items() for size in sizes]


def check_is_png(path: Path) -> None:
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("sizes", [[2**20], [2**14, 2**20, 10**8]], ids=["one size", "three sizes"])
def test_a_figure_is_drawn(tmp_path: Path, sizes: list[int]) -> None:
    draw_all_reduce({"2 ranks, float32": results(sizes)}, tmp_path / "one.png", subtitle="a machine")
    check_is_png(tmp_path / "one.png")


def test_panels_may_lack_a_contestant_and_be_odd_in_number(tmp_path: Path) -> None:
    everyone = results([2**14, 2**20])
    fewer = [each for each in everyone if each.name != "gloo"]
    draw_all_reduce({"a": fewer, "b": everyone, "c": fewer}, tmp_path / "three.png", subtitle="a machine")
    check_is_png(tmp_path / "three.png")


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".PNG"])
def test_the_name_says_what_kind_of_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"figure{suffix}"
    draw_all_reduce({"a": results([2**20])}, path, subtitle="a machine")
    assert path.read_bytes()[:5] in (b"<?xml", b"%PDF-", PNG[:5])


def check_lines_differ(names: list[tuple[str, str | None]]) -> None:
    lines = plots._lines([result(*who, 2**20, 1.0) for who in names])
    looks = [(line["color"], line["linestyle"], line["marker"]) for line in lines.values()]
    assert len(set(looks)) == len(names)
    assert lines[COPY]["linestyle"] == "--"


COMMUNICATORS = [(name, "gloo") for name in ("flat", "naive", "hierarchical", "staged")]
PEERS = [("gloo", None), ("mpi4py", None), ("mpi-shared", None), (COPY, None)]


def test_every_contestant_has_a_line_of_its_own() -> None:
    check_lines_differ([*COMMUNICATORS, *PEERS])


def test_red_twin_lines_that_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "COLOURS", ("#000000",))
    monkeypatch.setattr(plots, "MARKERS", "o")
    with pytest.raises(AssertionError):
        check_lines_differ([*COMMUNICATORS, *PEERS])


def test_sizes_that_are_near_one_another_are_not_all_labelled() -> None:
    assert plots._spaced({4096}) == [4096]
    assert plots._spaced({2**10, 2**20, 2**30}) == [2**10, 2**20, 2**30]
    assert plots._spaced({2**20, 10**6, 10**9, 2**30}) == [10**6, 10**9]


@pytest.mark.parametrize("name", ["figure", "figure.txt", "nowhere/figure.png", "."])
def test_a_file_that_can_not_be_drawn_into_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"let its name end in \.png, \.svg, \.pdf|can't be written"):
        check(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"drawing needs matplotlib.*pip install 'renkei\[report\]'"):
        check(tmp_path / "figure.png")
