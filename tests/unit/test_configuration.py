"""Settings come from the recipe, a file and the command line, the last one winning; mistakes are told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from renkei.errors import UsageError
from renkei.recipes import RECIPES, configuration
from renkei.recipes.configuration import resolve
from renkei.recipes.recipe import Settings

DEFAULTS = RECIPES["digits"]().settings


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def check_the_last_one_wins(config: Path) -> None:
    """`epochs` is set everywhere, `seed` in the file and by --set, `momentum` in the file, `data` by its option."""
    settings, sources = resolve(
        DEFAULTS, config=config, assignments=["epochs=5", "seed=4", "epochs=6"], options={"data": "there"}
    )
    found = {
        name: (getattr(settings, name), sources[name]) for name in ("epochs", "seed", "momentum", "data", "dropout")
    }
    assert found == {
        "epochs": (6, "--set"),
        "seed": (4, "--set"),
        "momentum": (0.5, str(config)),
        "data": ("there", "--data"),
        "dropout": (0.0, "recipe"),
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, "epochs: 3\nseed: 3\nmomentum: 0.5\ndata: here\n")


# -- precedence ---------------------------------------------------------------------------------------------------


def test_without_anything_given_settings_are_the_recipes() -> None:
    settings, sources = resolve(DEFAULTS)
    assert settings == DEFAULTS
    assert sources == dict.fromkeys(DEFAULTS.model_dump(), "recipe")


def test_the_last_one_wins_and_each_source_is_told(config: Path) -> None:
    check_the_last_one_wins(config)


def test_an_option_that_was_not_given_leaves_the_setting_alone(config: Path) -> None:
    settings, sources = resolve(DEFAULTS, config=config, options={"data": None})
    assert (settings.data, sources["data"]) == ("here", str(config))


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert resolve(DEFAULTS, config=written(tmp_path, text))[0] == DEFAULTS


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("learning_rate=1e-3", "learning_rate", 0.001),  # to YAML 1.1 a text, since it has no point
        ("learning_rate=2", "learning_rate", 2.0),
        ("nesterov=false", "nesterov", False),
        ("micro_batch_size=null", "micro_batch_size", None),
        ("micro_batch_size=~", "micro_batch_size", None),
        ("data=null", "data", None),
        ("data='null'", "data", "null"),
        ("data=nullable", "data", "nullable"),
        ("data=yes", "data", "yes"),
        ("data=2024", "data", "2024"),
        ("data=a=b", "data", "a=b"),
        ("communicator=null", "communicator", "null"),
        ("communicator=null/gloo", "communicator", "null/gloo"),
        ("epochs=012", "epochs", 12),  # to YAML 1.1 ten
        (" epochs = 3 ", "epochs", 3),
    ],
)
def test_values_are_read_as_in_yaml(assignment: str, name: str, value: Any) -> None:
    assert getattr(resolve(DEFAULTS, assignments=[assignment])[0], name) == value


# -- mistakes -----------------------------------------------------------------------------------------------------


def check_told_in_one_line(reason: str, **given: Any) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(DEFAULTS, **given)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


ASSIGNMENTS = {
    "epoch=3": "setting in --set: 'epoch' is unknown; did you mean 'epochs'?",
    "xyz=3": "setting in --set: 'xyz' is unknown; known are communicator, data,",
    "epochs=0": "epochs=0 (from --set): input should be greater than or equal to 1",
    "epochs=2.5": "epochs=2.5 (from --set): input should be a valid integer",
    "epochs=many": "epochs=many (from --set): input should be a valid integer",
    "epochs=yes": "epochs=yes (from --set): input should be a valid integer",
    "epochs=true": "epochs=true (from --set): input should be a valid integer",
    "epochs=0x10": "epochs=0x10 (from --set): input should be a valid integer",
    "epochs=1:30": "epochs=1:30 (from --set): input should be a valid integer",  # to YAML 1.1 ninety
    "epochs=null": "epochs=None (from --set): input should be a valid integer",
    "epochs=2001-99-99": "epochs=2001-99-99 (from --set): input should be a valid integer",
    "epochs=[1, 2]": "epochs=['1', '2'] (from --set): ",
    "momentum=1": "momentum=1 (from --set): input should be less than 1",
    "learning_rate=on": "learning_rate=on (from --set): input should be a valid number",
    "learning_rate=inf": "learning_rate=inf (from --set): input should be a finite number",
    "learning_rate=.nan": "learning_rate=.nan (from --set): ",
    "nesterov=2": "nesterov=2 (from --set): input should be a valid boolean",
    "data=[a]": "data=['a'] (from --set): input should be a valid string",
    "communicator=falt": "communicator=falt (from --set): communicator 'falt' is unknown; did you mean 'flat'?",
    "communicator=flat/glo": "communicator=flat/glo (from --set): backend 'glo' is unknown; did you mean 'gloo'?",
    "communicator=flat/": "communicator=flat/ (from --set): backend '' is unknown; known are gloo, mpi, "
    "nccl, shared_memory",
    'communicator="a\\nb"': r"communicator='a\nb' (from --set): communicator 'a\nb' is unknown",
    "epochs": "--set epochs: must be name=value, as in --set epochs=10",
    "epochs=": "--set epochs=: must be name=value, as in --set epochs=10",
    "=3": "--set =3: must be name=value",
    "epochs=[1": "--set epochs=[1: the value can't be read; quote it as in YAML",
}


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_wrong_assignment_is_told_in_one_line(assignment: str) -> None:
    check_told_in_one_line(ASSIGNMENTS[assignment], assignments=[assignment])


FILES: dict[str, tuple[str | bytes, str]] = {
    "an unknown name": ("epoch: 3", "settings.yaml: 'epoch' is unknown; did you mean 'epochs'?"),
    "a wrong value": ("epochs: none", "settings.yaml): input should be a valid integer"),
    "no YAML": ("epochs: [1\nseed: }", "settings.yaml is no YAML: while parsing"),
    "true": ("epochs: true", "epochs=true (from "),
    "nothing as a communicator": ("communicator:", "communicator= (from "),
    "no text": (b"epochs: \xff\xfe\x00", "settings.yaml is no YAML"),
    "a list": ("- epochs: 3\n- seed: 1\n", "settings.yaml must hold names and values, as in 'epochs: 10'"),
    "a single value": ("3", "settings.yaml must hold names and values"),
    "a number as a name": ("3: epochs", "settings.yaml: '3' is unknown"),
    "nothing as a name": ("null: epochs", "settings.yaml must hold names and values"),
    "a list as a name": ("[epochs]: 3", "settings.yaml is no YAML: while constructing a mapping"),
    "code": ("epochs: !!python/object/apply:os.getpid []", "epochs=[] (from "),
    "what is nested without end": ("[" * 5000, "settings.yaml is no YAML: maximum recursion depth"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    text, reason = FILES[kind]
    check_told_in_one_line(reason, config=written(tmp_path, text))


def test_a_missing_file_and_a_folder_are_told_in_one_line(tmp_path: Path) -> None:
    check_told_in_one_line(f"config file {tmp_path / 'x'}: No such file", config=tmp_path / "x")
    check_told_in_one_line(f"config file {tmp_path}: Is a directory", config=tmp_path)


# -- the checks see what is wrong ---------------------------------------------------------------------------------


def test_red_twin_a_file_that_wins_over_the_command_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = resolve

    def backwards(defaults: Settings, *, config: Path, **given: Any) -> tuple[Settings, dict[str, str]]:
        changed, sources = honest(defaults, **given)
        settings, sources_in_file = honest(changed, config=config)
        return settings, {
            name: sources[name] if source == "recipe" else source for name, source in sources_in_file.items()
        }

    monkeypatch.setitem(globals(), "resolve", backwards)
    with pytest.raises(AssertionError):
        check_the_last_one_wins(config)


def test_red_twin_an_error_of_several_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Sequence[str]:
        raise UsageError("is no YAML: while parsing\n  in line 1")

    monkeypatch.setattr(configuration, "_read", fail)
    with pytest.raises(AssertionError):
        check_told_in_one_line("is no YAML", config=tmp_path)
