"""A recipe's settings and where each came from: the recipe, a file, or the command line, the last one winning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from renkei.errors import UsageError
from renkei.names import check_known
from renkei.recipes.recipe import Settings


def resolve(
    defaults: Settings,
    *,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """The settings to train with, and by name where each comes from.

    Args:
        defaults: the recipe's.
        config: a YAML file of names and values.
        assignments: ``name=value`` texts; values are written as in YAML.
        options: values from options of their own; None means not given.

    Raises:
        UsageError: a name is unknown, a value isn't allowed, or the file can't be read; in one line.
    """
    values: dict[str, Any] = defaults.model_dump()
    sources = dict.fromkeys(values, "recipe")
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if config is not None:
        layers.append((str(config), _read(config)))
    layers.append(("--set", dict(_parse(assignment) for assignment in assignments)))
    layers += [(f"--{name.replace('_', '-')}", {name: value}) for name, value in (options or {}).items()]
    for source, layer in layers:
        for name, value in layer.items():
            check_known(f"setting in {source}:", name, values)
            if source != f"--{name}" or value is not None:
                values[name], sources[name] = value, source
    try:
        return type(defaults)(**values), sources
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UsageError(f"{name}={first['input']!r} (from {sources[name]}): {first['msg'].lower()}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no text, or a date that isn't one
        raise UsageError(f"config file {path} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"config file {path} must hold names and values, as in 'epochs: 10'")
    return content


def _parse(assignment: str) -> tuple[str, Any]:
    name, equals, value = assignment.partition("=")
    if not equals or not name:
        raise UsageError(f"--set {assignment}: must be name=value, as in --set epochs=10")
    try:
        return name.strip(), yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):  # ValueError: 2001-99-99 is read as a date
        raise UsageError(f"--set {assignment}: the value can't be read; quote it as in YAML") from None
