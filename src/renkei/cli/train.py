"""``renkei train``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from renkei.cli.in_job import is_to_start, start_this_command
from renkei.errors import UsageError
from renkei.launch.environments import detect
from renkei.strict_json import dumps
from renkei.training.run_dir import create, new_run_dir


def train(
    recipe: Annotated[str, typer.Argument(help="Which recipe: digits, fashion-mnist.")] = "digits",
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", help="Start this many ranks here.", show_default="1")
    ] = None,
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
    if settings.data is not None and not Path(settings.data).is_dir():
        raise UsageError(f"data={settings.data} (from {sources['data']}): there is no such folder")
    if print_config:
        _print_config(settings.model_dump(), sources, as_json)
    elif is_to_start(num_ranks):
        assert num_ranks is not None
        run_dir = run_dir or new_run_dir(recipe)
        create(run_dir)
        start_this_command(num_ranks, ["--run-dir", str(run_dir)], log_dir=run_dir)
    else:
        from renkei.recipes.train import train as train_here

        result = train_here(chosen, settings, run_dir)
        if detect(os.environ).rank == 0:
            print(dumps(result) if as_json else _describe(result), flush=True)


def _print_config(settings: dict[str, Any], sources: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"settings": settings, "sources": sources}))
        return
    width = max(map(len, settings))
    for name, value in settings.items():
        print(f"{name:{width}}  {json.dumps(value):12}  {sources[name]}")


def _describe(result: dict[str, Any]) -> str:
    return (
        f"{result['recipe']}: top-1 {result['top1']:.4f}, loss {result['loss']:.4f} after {result['epochs']} epochs "
        f"({result['steps']} steps) on {result['world_size']} ranks; {result['samples_per_second']:,.0f} samples/s, "
        f"{result['seconds']:.1f} s in all; records in {result['run_dir']}"
    )
