"""The public names: one table, the same names for type checkers, and nothing loaded before it is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import renkei


def names_for_type_checkers(source: str) -> dict[str, str]:
    """By name, the module it is imported from under TYPE_CHECKING, each as itself."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                for alias in statement.names:
                    assert alias.asname == alias.name
                    found[alias.name] = str(statement.module)
    return found


def check_names(source: str) -> None:
    """The table that finds names and the imports that type checkers see are the same."""
    assert names_for_type_checkers(source) == renkei._HOMES


def test_type_checkers_see_the_names_that_the_table_finds() -> None:
    check_names(Path(renkei.__file__).read_text())


def test_red_twin_a_name_that_type_checkers_do_not_see() -> None:
    lines = Path(renkei.__file__).read_text().splitlines()
    without = [line for line in lines if "import Topology as Topology" not in line]
    assert len(without) == len(lines) - 1
    with pytest.raises(AssertionError):
        check_names("\n".join(without))


def test_the_list_is_sorted_and_has_no_private_name() -> None:
    assert renkei.__all__ == sorted(renkei._HOMES)
    assert not [name for name in renkei.__all__ if name.startswith("_")]
    assert set(renkei.__all__) <= set(dir(renkei))


@pytest.mark.parametrize("name", renkei.__all__)
def test_every_name_is_found_in_its_home_and_documented(name: str) -> None:
    thing = getattr(renkei, name)
    assert thing is getattr(importlib.import_module(renkei._HOMES[name]), name)
    if not inspect.ismodule(thing):
        assert thing.__module__ == renkei._HOMES[name]
    assert thing.__doc__


def test_what_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'renkei' has no attribute 'communicator_of_my_dreams'"):
        _ = renkei.communicator_of_my_dreams
    assert not hasattr(renkei, "torch")


# Modules that a program may import without waiting for torch.
QUICK = [
    "renkei",
    "renkei.errors",
    "renkei.topology",
    "renkei.launch.environments",
    "renkei.launch.rendezvous",
    "renkei.launch.local",
    "renkei.launch.child",
    "renkei.failures.first_cause",
]


@pytest.mark.parametrize("module", QUICK)
def test_importing_it_loads_neither_torch_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
