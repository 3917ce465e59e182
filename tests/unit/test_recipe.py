"""Recipes are frozen, refuse what they don't know, and can be looked at without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from renkei.recipes import RECIPES, threads, train
from renkei.recipes.recipe import Recipe, Settings

every_recipe = pytest.mark.parametrize("name", RECIPES)


@every_recipe
def test_a_recipe_goes_by_its_name(name: str) -> None:
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert RECIPES[name]().settings == recipe.settings


@every_recipe
def test_a_recipe_and_its_settings_are_frozen(name: str) -> None:
    recipe = RECIPES[name]()
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.settings.epochs = 1


def test_settings_that_are_not_known_are_forbidden() -> None:
    with pytest.raises(ValidationError, match="epoch\n  Extra inputs are not permitted"):
        Settings(epochs=1, global_batch_size=1, learning_rate=0.1, epoch=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("global_batch_size", 0),
        ("micro_batch_size", 0),
        ("evaluation_batch_size", 0),
        ("learning_rate", 0),
        ("learning_rate", float("inf")),
        ("warmup_epochs", -1),
        ("momentum", 1),
        ("label_smoothing", 1),
        ("dropout", -0.1),
        ("weight_decay", float("nan")),
        ("seed", -1),
        ("threads", 0),
        ("report_every", 0),
        ("epochs", True),
        ("threads", True),
        ("seed", False),
        ("learning_rate", True),
        ("dropout", False),
        ("communicator", "falt"),
        ("communicator", "flat/mpich"),
    ],
)
def test_values_that_make_no_sense_are_forbidden(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"1 validation error for Settings\n{name}\n"):
        Settings(**{"epochs": 1, "global_batch_size": 1, "learning_rate": 0.1, name: value})


def test_a_wire_is_one_that_there_is_or_is_chosen() -> None:
    settings = RECIPES["digits"]().settings.model_dump()
    assert [settings[name] for name in ("wire", "double_buffering")] == ["fp32", None]
    for wire in ("auto", "bf16"):
        assert Settings(**settings | {"wire": wire}).wire == wire
    with pytest.raises(ValidationError, match="did you mean 'auto'"):
        Settings(**settings | {"wire": "atuo"})


def test_the_digits_recipe_loads_and_builds() -> None:
    recipe: Recipe = RECIPES["digits"]()
    training, held_out = recipe.load(recipe.settings)
    assert (len(training), len(held_out)) == (1438, 359)
    model = recipe.build(recipe.settings)
    assert model(training.images[:5]).shape == (5, 10)


# -- threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_threads(monkeypatch: pytest.MonkeyPatch, given: int | None, omp: str, expected: int) -> None:
    """As many threads as expected are set, from 5, before the communicator is created, which says how many there are.

    The rank is one of two on its host, with two on another.
    """
    found: list[int] = []

    def create(name: str) -> None:
        found.append(torch.get_num_threads())
        raise InterruptedError

    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(train, "create_communicator", create)
    monkeypatch.setattr(threads, "join", lambda: SimpleNamespace(rank=3, nodes=["a", "b", "a", "b"]))
    monkeypatch.setattr(threads, "threads_per_rank", lambda num_ranks: 12 // num_ranks)
    torch.set_num_threads(5)
    recipe = replace(RECIPES["digits"](), load=lambda settings: (None, None))
    with pytest.raises(InterruptedError):
        train.train(recipe, recipe.settings.model_copy(update={"threads": given}))
    assert found == [expected]


THREADS = {"the setting": (3, "4", 3), "OMP_NUM_THREADS": (None, "4", 5), "cores by ranks here": (None, "", 6)}


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("by", THREADS)
def test_threads_are_set_before_the_communicator_tells_them(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    check_threads(monkeypatch, *THREADS[by])


@pytest.mark.usefixtures("_threads_as_before")
def test_red_twin_threads_that_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "set_threads", lambda threads: None)
    with pytest.raises(AssertionError):
        check_threads(monkeypatch, *THREADS["the setting"])


# -- without torch ------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """The modules a fresh interpreter has loaded after a statement."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    return set(json.loads(result.stdout))


def check_without_torch(statement: str) -> None:
    assert "torch" not in loaded_by(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "import renkei",
        "import renkei.recipes; renkei.recipes.RECIPES['digits']().settings",
        "import renkei.recipes.configuration, renkei.names, renkei.optim.schedules, renkei.training.run_dir",
        "import renkei.cli.main",
    ],
)
def test_no_torch_is_loaded_by(statement: str) -> None:
    check_without_torch(statement)


def test_red_twin_a_recipe_that_loads_torch() -> None:
    with pytest.raises(AssertionError):
        check_without_torch("import renkei.recipes.train")
