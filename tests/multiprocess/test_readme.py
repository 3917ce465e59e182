"""The README's two scripts, as they stand there: the second trains the same however many ranks it is started on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from multiprocess.commands import RENKEI, TORCHRUN, Outcome, run
from needs import MPIEXEC, mpich

ONE_SAMPLE = 1 / 261 + 0.001  # what the last bits of a sum may decide, and rounding
README = Path(__file__).parents[2] / "README.md"


def read_scripts() -> list[str]:
    """One process, then many."""
    one, many = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [one, many]


def write_train(folder: Path) -> Path:
    """The script for many, as the README says."""
    script = folder / "train.py"
    script.write_text(read_scripts()[1])
    return script


def top1(outcome: Outcome) -> float:
    assert outcome.code == 0, outcome.err
    (line,) = outcome.out.splitlines()
    name, value = line.split()
    assert name == "top-1"
    assert float(value) > 0.8
    return float(value)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> float:
    train = write_train(tmp_path_factory.mktemp("alone"))
    return top1(run(sys.executable, str(train), cwd=train.parent))


def test_lines_not_marked_as_new_are_those_of_one_process() -> None:
    one, many = (script.replace(".to(comm.device)", "").splitlines() for script in read_scripts())
    kept = [line for line in many if "# new" not in line]
    assert [line for line in one[:-2] if line not in kept] == [
        "loader = torch.utils.data.DataLoader(train, batch_size=256, shuffle=True)"
    ]
    assert sum("# new" in line for line in many) == 5


def test_the_script_for_one_process_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(read_scripts()[0])
    top1(run(sys.executable, str(script), cwd=tmp_path))


WAYS = {
    "launch": [RENKEI, "launch", "-n", "2"],
    "torchrun": [TORCHRUN, "--nproc-per-node", "2"],
    "mpiexec": [str(MPIEXEC), "-n", "2", sys.executable],
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=name, marks=[mpich] if name == "mpiexec" else []) for name, way in WAYS.items()]
)
def test_the_script_for_many_trains_the_same_in_every_way_told(
    way: list[str], on_one_rank: float, tmp_path: Path
) -> None:
    train = write_train(tmp_path)
    found = top1(run(*way, str(train), cwd=tmp_path, OMP_NUM_THREADS="1"))
    assert found == pytest.approx(on_one_rank, abs=ONE_SAMPLE)


def test_three_ranks_are_told_what_to_write_and_that_is_right(on_one_rank: float, tmp_path: Path) -> None:
    train = write_train(tmp_path)
    outcome = run(RENKEI, "launch", "-n", "3", str(train), cwd=tmp_path)
    assert outcome.code == 2
    assert "optimizer.backward(loss, weight=len(x))" in outcome.err.splitlines()[-1]
    plain = "torch.nn.functional.cross_entropy(model(images), target).backward()"
    weighted = "optimizer.backward(torch.nn.functional.cross_entropy(model(images), target), weight=len(images))"
    train.write_text(train.read_text().replace(plain, weighted))
    assert top1(run(RENKEI, "launch", "-n", "3", str(train), cwd=tmp_path)) == pytest.approx(
        on_one_rank, abs=ONE_SAMPLE
    )
