"""``renkei train``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from renkei.cli.in_job import NumRanks, is_to_start, start_this_command
from renkei.cli.output import show
from renkei.errors import UsageError
from renkei.launch.environments import detect
from renkei.strict_json import dumps
from renkei.training.run_dir import check_unused, create, is_used, new_run_dir, take_back


def train(
    recipe: Annotated[str, typer.Argument(help="Which recipe: digits, fashion-mnist.")] = "digits",
    num_ranks: NumRanks = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of the data, for --set data=DIR.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for records.", show_default="new, in runs/")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print each setting and where it comes from, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a recipe, on ranks started here or by torchrun, mpiexec or srun."""
    from renkei.names import check_known
    from renkei.recipes import RECIPES
    from renkei.recipes.configuration import resolve

    check_known("recipe", recipe, RECIPES)
    chosen = RECIPES[recipe]()
    settings, sources = resolve(chosen.settings, config=config, assignments=assignments or (), options={"data": data})
    if settings.data is not None and not os.path.isdir(settings.data):
        raise UsageError(f"data={settings.data} (from {sources['data']}): there is no such folder")
    if print_config:
        show(_describe_settings(settings.model_dump(), sources, as_json))
    elif is_to_start(num_ranks):
        assert num_ranks is not None
        with _folder(run_dir or new_run_dir(recipe)) as folder:
            start_this_command(num_ranks, ["--run-dir", str(folder)], log_dir=folder)
    else:
        from renkei.recipes.train import train as train_here

        result = train_here(chosen, settings, run_dir)
        if detect(os.environ).rank == 0:
            show(dumps(result) if as_json else _describe(result))


@contextmanager
def _folder(run_dir: Path) -> Iterator[Path]:
    """A folder for a run that is about to be started; what is refused before it has begun leaves none."""
    check_unused(run_dir)  # now, for the logs of ranks come before their records
    made = create(run_dir)
    try:
        yield run_dir
    except (typer.Exit, UsageError) as refused:
        if refused.exit_code == 2 and not is_used(run_dir):
            take_back(made)
        raise


def _describe_settings(settings: dict[str, Any], sources: dict[str, str], as_json: bool) -> str:
    if as_json:
        return dumps({"settings": settings, "sources": sources})
    width = max(map(len, settings))
    return "\n".join(f"{name:{width}}  {json.dumps(value):12}  {sources[name]}" for name, value in settings.items())


def _describe(result: dict[str, Any]) -> str:
    return (
        f"{result['recipe']}: top-1 {result['top1']:.4f}, loss {result['loss']:.4f} after {result['epochs']} epochs "
        f"({result['steps']} steps) on {result['world_size']} ranks; {result['samples_per_second']:,.0f} samples/s, "
        f"{result['seconds']:.1f} s in all; records in {result['run_dir']}"
    )
