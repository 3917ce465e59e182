"""Recipes are frozen, refuse what they don't know, and can be looked at without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from pydantic import ValidationError

from renkei.recipes import RECIPES
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
    ],
)
def test_values_that_make_no_sense_are_forbidden(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{"epochs": 1, "global_batch_size": 1, "learning_rate": 0.1, name: value})


def test_the_digits_recipe_loads_and_builds() -> None:
    recipe: Recipe = RECIPES["digits"]()
    training, held_out = recipe.load(recipe.settings)
    assert (len(training), len(held_out)) == (1438, 359)
    model = recipe.build(recipe.settings)
    assert model(training.images[:5]).shape == (5, 10)


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
