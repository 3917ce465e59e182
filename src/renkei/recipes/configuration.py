"""A recipe's settings and where each came from: the recipe, a file, or the command line, the last one winning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
        assignments: ``name=value`` texts; values are written as in YAML, and read by the type of the setting.
        options: values from options of their own; None means not given.

    Raises:
        UsageError: a name is unknown, a value isn't allowed, or the file can't be read; in one line.
    """
    values: dict[str, Any] = defaults.model_dump()
    sources = dict.fromkeys(values, "recipe")
    for source, layer in _layers(config, assignments, options or {}):
        for name, value in layer.items():
            check_known(f"setting in {source}:", name, values)
            values[name], sources[name] = value, source
    try:
        return type(defaults)(**values), sources
    except ValidationError as error:
        raise UsageError(_in_one_line(error, sources)) from None


class _Texts(yaml.BaseLoader):
    """YAML whose values are texts, but for null: each setting reads its own.

    By YAML 1.1's own rules 012 is ten, 1:30 is ninety, yes is true, and a communicator can't be called null.
    """


_Texts.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(?:~|null|Null|NULL)$"), ["~", "n", "N"])
_Texts.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)


def _layers(
    config: Path | None, assignments: Sequence[str], options: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where values come from, and the values; the last one wins."""
    if config is not None:
        yield str(config), _read(config)
    yield "--set", dict(_parse(assignment) for assignment in assignments)
    for name, value in options.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}", {name: value}


def _in_one_line(error: ValidationError, sources: Mapping[str, str]) -> str:
    first = error.errors()[0]
    name, value = str(first["loc"][0]), first["input"]
    shown = value if isinstance(value, str) and value.isprintable() else repr(value)
    ours = first.get("ctx", {}).get("error")  # what a check of `Settings` has raised
    return f"{name}={shown} (from {sources[name]}): {ours or first['msg'].lower()}"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = yaml.load(file, _Texts)
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"config file {path} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"config file {path} must hold names and values, as in 'epochs: 10'")
    return content


def _parse(assignment: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in assignment.partition("="))
    if not name or not value:
        raise UsageError(f"--set {assignment}: must be name=value, as in --set epochs=10")
    try:
        return name, yaml.load(value, _Texts)
    except (yaml.YAMLError, RecursionError):
        raise UsageError(f"--set {assignment}: the value can't be read; quote it as in YAML") from None
