"""Imports point one way: arithmetic knows no tensors, gradients know no ranks, communicators know no models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import renkei

ROOT = Path(renkei.__file__).parent

Imports = dict[str, set[str]]

# May not import torch, nor anything that does.
WITHOUT_TORCH = ["errors", "topology", "data.sharding", "gradients.buckets", "optim.schedules", "launch", "failures",
                 "planner", "names", "communicators.requested",
                 "communicators.exchange_times", "optim.wire_choice",
                 "gradients.compression.names"]  # fmt: skip
# May import torch.distributed; the others reach it through a communicator.
MAY_DISTRIBUTE = ["communicators", "failures", "launch.local", "testing", "model_parallel.pipeline",
                  "training.checkpoint", "bench", "hooks"]  # fmt: skip
# By part, the parts it may not import.
FORBIDDEN = {
    "errors": ["communicators", "data", "failures", "gradients", "launch", "optim", "topology", "training"],
    "topology": ["communicators", "data", "failures", "gradients", "launch", "optim", "training"],
    "gradients": ["communicators", "optim", "training", "launch", "failures", "models", "recipes", "cli", "data"],
    "communicators": ["optim", "training", "models", "recipes", "cli", "model_parallel", "bench"],
    "launch": ["communicators", "optim", "training", "models", "recipes", "cli", "gradients", "data"],
    "failures": ["communicators", "optim", "training", "models", "recipes", "cli", "gradients", "data"],
    "models": ["communicators", "optim", "training", "recipes", "cli", "launch"],
    "optim": ["training", "recipes", "cli", "launch", "bench"],
    "training": ["recipes", "cli", "bench"],
    "recipes": ["cli", "bench"],
}


def part_of(module: str, parts: list[str]) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """All that a module imports, anywhere in it, also for type checkers alone, and what of torch.distributed it uses.

    That needs no import of its own, for ``import torch`` brings it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and part_of(used := ast.unparse(node), ["torch.distributed"]):
            yield used


def read_imports() -> Imports:
    """By module of the package, without its name, what it imports."""
    imports = {}
    for path in ROOT.rglob("*.py"):
        if path.parent == ROOT and path.name in ("__init__.py", "__main__.py"):
            continue  # lazy: names every part
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        imports[module] = set(imports_of(ast.parse(path.read_text())))
    return imports


def reachable(module: str, imports: Imports) -> set[str]:
    """All that is loaded, at once or in the end, with a module of the package."""
    found: set[str] = set()
    to_do = [module]
    while to_do:
        for name in imports[to_do.pop()] - found:
            found.add(name)
            inside = name.removeprefix("renkei.") if name.startswith("renkei.") else ""
            to_do += [each for each in (inside, inside.rpartition(".")[0]) if each in imports]
    return found


def check_without_torch(imports: Imports) -> None:
    quick = [module for module in imports if part_of(module, WITHOUT_TORCH)]
    loading = [module for module in quick if any(part_of(name, ["torch"]) for name in reachable(module, imports))]
    assert not loading


def check_who_distributes(imports: Imports) -> None:
    for module, names in imports.items():
        if not part_of(module, MAY_DISTRIBUTE):
            assert not [name for name in names if part_of(name, ["torch.distributed"])], module


def check_directions(imports: Imports) -> None:
    for module, names in imports.items():
        for part, forbidden in FORBIDDEN.items():
            if part_of(module, [part]):
                wrong = [name for name in names if part_of(name, [f"renkei.{each}" for each in forbidden])]
                assert not wrong, f"{module} imports {wrong}"


CHECKS = [check_without_torch, check_who_distributes, check_directions]


@pytest.mark.parametrize("check", CHECKS)
def test_imports(check: object) -> None:
    assert callable(check)
    check(read_imports())


def test_the_parts_that_are_there_are_read() -> None:
    imports = read_imports()
    assert {"errors", "communicators.channel", "gradients.buckets", "launch.local"} <= set(imports)
    assert "torch" in imports["communicators.channel"]


def test_red_twin_torch_distributed_without_an_import() -> None:
    source = "import torch\ntorch.distributed.destroy_process_group()\ntorch.distributions.Normal(0, 1)"
    used = set(imports_of(ast.parse(source)))
    assert used == {"torch", "torch.distributed", "torch.distributed.destroy_process_group"}
    with pytest.raises(AssertionError, match="bench"):
        check_who_distributes({"cli.bench": used})


@pytest.mark.parametrize(
    ("check", "module", "name"),
    [
        (check_without_torch, "topology", "torch.Tensor"),
        (check_without_torch, "launch.environments", "renkei.communicators.headers"),
        (check_without_torch, "gradients.buckets", "renkei.gradients.flat.FlatGradients"),
        (check_who_distributes, "gradients.flat", "torch.distributed"),
        (check_who_distributes, "optim.multi_node", "torch.distributed.ReduceOp"),
        (check_directions, "gradients.flat", "renkei.communicators.communicator.Communicator"),
        (check_directions, "communicators.flat", "renkei.optim.multi_node.MultiNodeOptimizer"),
    ],
)
def test_red_twin_a_wrong_import(check: object, module: str, name: str) -> None:
    assert callable(check)
    imports = read_imports()
    imports[module].add(name)
    with pytest.raises(AssertionError, match=module):
        check(imports)
