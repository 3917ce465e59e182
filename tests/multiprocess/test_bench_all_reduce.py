"""`renkei bench all-reduce` in real processes: who was measured, that the numbers fit together, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from multiprocess.commands import (
    PATIENCE,
    RENKEI,
    Outcome,
    check_json_alone,
    check_refused,
    run,
    strictly,
    without_announcements,
)
from needs import MPIEXEC, mpich
from processes import plain_environment
from renkei.bench import contestants
from renkei.bench.bandwidth import bus_bandwidth
from renkei.bench.contestants import DTYPES
from renkei.cli import bench_all_reduce
from unit.test_plots import check_is_png

KEYS = {
    "communicator", "backend", "dtype", "bytes", "median_ms", "quartiles_ms", "bus_gb_per_s", "of_memory", "ratio",
}  # fmt: skip
FLAT, COPY = ("flat", "gloo"), ("copy", None)
FLAT_GLOO = ("--communicators", "flat/gloo")


def all_reduce(*arguments: str, cwd: Path, ranks: int = 2) -> Outcome:
    options = ("-n", str(ranks), "--rounds", "5", *([] if "--communicators" in arguments else FLAT_GLOO), *arguments)
    return run(RENKEI, "bench", "all-reduce", *options, cwd=cwd)


def check_results(
    found: dict[str, Any], cases: Sequence[tuple[str, int]], contestants: Sequence[tuple[str, str | None]]
) -> None:
    assert list(found) == ["results"]
    results = found["results"]
    assert [(each["dtype"], each["bytes"], each["communicator"], each["backend"]) for each in results] == [
        (*case, *contestant) for case in cases for contestant in contestants
    ]
    for result in results:
        assert set(result) == KEYS
        low, high = result["quartiles_ms"]
        assert 0 < low <= result["median_ms"] <= high
        assert result["of_memory"] > 0
        if result["communicator"] == "copy":
            assert (result["of_memory"], result["bus_gb_per_s"], result["ratio"]) == (1.0, None, None)
        else:
            bus = bus_bandwidth(result["bytes"], result["median_ms"] / 1000, num_ranks=2)
            assert result["bus_gb_per_s"] == pytest.approx(bus, rel=0.01)  # both were rounded
    for case in cases:
        ratios = [each["ratio"] for each in results if (each["dtype"], each["bytes"]) == case and not each["backend"]]
        assert len(ratios) == 1 or 1.0 in ratios


def test_a_communicator_is_measured_against_torch_and_memory_and_drawn(tmp_path: Path) -> None:
    options = ("--sizes", "16KiB,100kB", "--dtypes", "float32,bfloat16", "--json", "--plot", "figure.png")
    found = check_json_alone(all_reduce(*options, cwd=tmp_path))
    cases = [(dtype, size) for dtype in ("float32", "bfloat16") for size in (16384, 100_000)]
    check_results(found, cases, [FLAT, ("gloo", None), COPY])
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
    check_is_png(tmp_path / "figure.png")


@mpich
def test_what_needs_mpi_is_started_by_mpiexec(tmp_path: Path) -> None:
    options = ("--peers", "mpi4py,mpi-shared", "--sizes", "4099,100kB", "--dtypes", "float32,float64", "--json")
    outcome = all_reduce(*options, cwd=tmp_path)
    sizes = {"float32": (4096, 100_000), "float64": (4096, 100_000)}
    cases = [(dtype, size) for dtype, of_dtype in sizes.items() for size in of_dtype]
    check_results(check_json_alone(outcome), cases, [FLAT, ("mpi4py", None), ("mpi-shared", None), COPY])
    assert "2 ranks on 1 node, started by mpich; flat/gloo" in outcome.err
    assert without_announcements(outcome.err) == []


def test_communicators_are_told_apart_by_their_backends_and_measured_once(tmp_path: Path) -> None:
    names = "hierarchical/gloo,hierarchical/shared_memory+gloo,hierarchical/gloo+gloo"
    found = check_json_alone(all_reduce("--communicators", names, "--sizes", "16KiB", "--json", cwd=tmp_path))
    two_level = [("hierarchical", "gloo+gloo"), ("hierarchical", "shared_memory+gloo")]
    check_results(found, [("float32", 16384)], [*two_level, ("gloo", None), COPY])


@mpich
def test_a_dtype_that_a_peer_does_not_know_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    options = ("--peers", "gloo,mpi4py", "--sizes", "16KiB", "--dtypes", "float16", "--json")
    outcome = all_reduce(*options, cwd=tmp_path)
    check_results(check_json_alone(outcome), [("float16", 16384)], [FLAT, ("gloo", None), COPY])
    assert without_announcements(outcome.err) == ["renkei: mpi4py doesn't know float16: left out"]


def test_without_json_the_results_are_a_table(tmp_path: Path) -> None:
    outcome = all_reduce("--sizes", "1MiB", "--peers", "", cwd=tmp_path, ranks=1)
    assert outcome.code == 0, outcome.err
    assert "measuring" not in outcome.err  # which is no terminal
    heads, *rows = (re.split(" {2,}", line.strip()) for line in outcome.out.splitlines())
    assert heads == ["buffer", "who", "ms", "quartiles", "bus, GB/s", "of memory", "of best peer"]
    assert [row[:2] for row in rows] == [["1 MiB float32", "flat/gloo"], ["1 MiB float32", "copy"]]
    assert rows[1][-1] == "1"


def test_progress_is_shown_if_asked_for_and_apart_from_results(tmp_path: Path) -> None:
    outcome = all_reduce("--sizes", "16KiB", "--json", "--progress", cwd=tmp_path, ranks=1)
    check_json_alone(outcome)
    assert "measuring" in outcome.err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no size": (["--sizes", "1 mebibyte"], "size '1 mebibyte' can't be read; write it as 16KiB, 1MiB or 10MB"),
    "nothing": (["--sizes", "1MiB,0"], "size '0' is nothing to add"),
    "no sizes": (["--sizes", ","], "--sizes names none; name one, as in --sizes 1MiB"),
    "less than an element": (
        ["--sizes", "4", "--dtypes", "float32,float64"],
        "a buffer of 4 B can't hold a float64; give at least 8 bytes",
    ),
    "more than there is": (["--sizes", "900000GiB"], "give smaller --sizes"),
    "an unknown dtype": (["--dtypes", "float31"], "dtype 'float31' is unknown; did you mean 'float32'?"),
    "no dtypes": (["--dtypes", ""], "--dtypes names none; name one, as in --dtypes float32"),
    "an unknown peer": (["--peers", "mpi5py"], "peer 'mpi5py' is unknown; did you mean 'mpi4py'?"),
    "nobody": (["--communicators", "", "--peers", ""], "--communicators and --peers name none"),
    "an unknown algorithm": (["--communicators", "falt"], "communicator 'falt' is unknown; did you mean 'flat'?"),
    "an unknown algorithm over MPI": (["--communicators", "falt/mpi"], "did you mean 'flat'?"),
    "two backends of one level": (["--communicators", "flat/gloo+mpi"], "use one of hierarchical, staged"),
    "an unknown backend": (["--communicators", "flat/glo"], "backend 'glo' is unknown; did you mean 'gloo'?"),
    "a figure of no kind": (["--plot", "figure"], "figure figure: its kind can't be told"),
    "a figure nowhere": (["--plot", "nowhere/figure.png"], "figure nowhere/figure.png can't be written"),
    "too few rounds": (["--rounds", "4"], "'--rounds': Input should be greater than or equal to 5"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    arguments, reason = MISTAKES[kind]
    check_refused(all_reduce(*arguments, cwd=tmp_path), reason)
    assert not list(tmp_path.iterdir())


def check_told(outcome: Outcome, reason: str) -> None:
    """As `check_refused`, where ranks were started and have said how they stand."""
    *announcements, line = outcome.err.splitlines()
    assert without_announcements("\n".join(announcements)) == []
    check_refused(Outcome(outcome.code, outcome.out, line), reason)


def test_red_twin_who_does_not_add_is_refused(tmp_path: Path) -> None:
    check_told(all_reduce("--communicators", "flat,null", cwd=tmp_path), "'null' doesn't add other ranks' buffers")


def test_mpi_peers_of_ranks_that_mpi_does_not_know_are_refused(tmp_path: Path) -> None:
    arguments = ("bench", "all-reduce", *FLAT_GLOO, "--peers", "mpi4py", "--sizes", "16KiB")
    outcome = run(RENKEI, "launch", "-n", "2", "-m", "renkei", *arguments, cwd=tmp_path)
    check_told(outcome, "peer 'mpi4py' needs ranks that mpiexec has started, but renkei has started these")


def test_without_matplotlib_it_is_told_what_to_install_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none here')\n")
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    outcome = run(RENKEI, "bench", "all-reduce", "-n", "2", "--plot", "figure.png", cwd=tmp_path, **variables)
    check_refused(outcome, "drawing needs matplotlib", "pip install 'renkei[report]'")


# Measures with a peer whose sum on rank 1 is wrong, or with one that fails there while rank 0 waits for it in MPI.
SPOILT = r"""
import sys
from renkei.bench import mpi_peers
from renkei.cli.main import main
kind, *sys.argv[1:] = sys.argv[1:]
correct = mpi_peers.all_reduce
def spoilt(world, array):
    add = correct(world, array)
    calls = []
    def wrong():
        calls.append(None)
        if kind == "fails" and len(calls) == 3 and world.rank == 1:
            raise ZeroDivisionError
        add()
        if kind == "wrong" and world.rank == 1:
            array[-1] += 1
    return wrong
mpi_peers.all_reduce = spoilt
main()
"""


def spoilt(kind: str, folder: Path) -> Outcome:
    program = folder / "program.py"
    program.write_text(SPOILT)
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, str(program), kind,
         "bench", "all-reduce", *FLAT_GLOO, "--peers", "mpi4py", "--sizes", "16KiB", "--rounds", "5"],
        env=plain_environment(), cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    for left in set(Path("/dev/shm").glob("mpich_shm_*")) - before:  # MPI_Abort leaves it
        left.unlink()
    return Outcome(done.returncode, done.stdout, done.stderr)


@mpich
def test_red_twin_a_peer_whose_sum_is_wrong_is_refused(tmp_path: Path) -> None:
    outcome = spoilt("wrong", tmp_path)
    assert outcome.code == 1
    assert outcome.out == ""
    assert "mpi4py adds wrongly: element 4095 of 4096 torch.float32 on rank 1 is " in outcome.err


@mpich
def test_a_rank_that_fails_while_another_waits_for_it_in_mpi_ends_the_job(tmp_path: Path) -> None:
    outcome = spoilt("fails", tmp_path)
    assert outcome.code == 1
    assert outcome.out == ""
    assert "first cause: rank 1 on" in outcome.err
    assert "ZeroDivisionError" in outcome.err


# -- names, and what help loads -----------------------------------------------------------------------------------

FRESH = """
import sys
from renkei.cli.main import main
sys.argv = ["renkei", *sys.argv[1:]]
try:
    main()
finally:
    print(sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["bench --help", "bench all-reduce --help", "bench all-reduce -n 2 --sizes 1x"])
def test_nothing_large_is_loaded_by(tmp_path: Path, command: str) -> None:
    outcome = run(sys.executable, "-c", FRESH, *command.split(), cwd=tmp_path)
    assert outcome.err.splitlines()[-1] == "[]"
    assert outcome.code == (2 if "1x" in command else 0)


def test_the_peers_and_dtypes_that_the_command_names_are_those_there_are() -> None:
    assert set(bench_all_reduce.PEERS) == set(contestants.PEERS)
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == bench_all_reduce.DTYPES


def test_red_twin_results_that_do_not_fit_together(tmp_path: Path) -> None:
    honest = {
        "communicator": "flat", "backend": "gloo", "dtype": "float32", "bytes": 10**6, "median_ms": 2.0,
        "quartiles_ms": [1.0, 3.0], "bus_gb_per_s": 0.5, "of_memory": 0.1, "ratio": None,
    }  # fmt: skip
    copy = honest | {"communicator": "copy", "backend": None, "bus_gb_per_s": None, "of_memory": 1.0}
    check_results({"results": [honest, copy]}, [("float32", 10**6)], [FLAT, COPY])
    wrong = [{"bus_gb_per_s": 1.0}, {"quartiles_ms": [2.5, 3.0]}, {"of_memory": 0}, {"more": 1}, {"backend": None}]
    for change in wrong:
        with pytest.raises(AssertionError):
            check_results({"results": [honest | change, copy]}, [("float32", 10**6)], [FLAT, COPY])
    with pytest.raises((AssertionError, KeyError)):
        check_results(strictly('{"results": [], "more": 1}'), [], [])
