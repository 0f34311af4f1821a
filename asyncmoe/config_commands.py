"""The commands `asyncmoe config show | schema | validate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Show, check and describe configurations; starts nothing.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file that describes the run, or the directory of a run.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run; it may have been moved or copied.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override, e.g. run.steps=100.")]


@app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the configuration with every default and override, as YAML that describes the same run."""
    typer.echo(shown(configuration.load(config, overrides or ())), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of configurations, with which editors complete and check keys."""
    typer.echo(json.dumps(json_schema(), indent=1))


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check everything that can be checked before a run starts: keys, sizes, model, data, your own code, the engines' Python, checkpoints.

    Your own modules are imported, as in a run. `asyncmoe doctor CONFIG` does this too, and checks the machine: ports, disk, GPUs.
    """
    loaded = checked_keys(config, overrides or ())
    from asyncmoe.launch.validate import validate as check

    typer.echo(f"{config} is valid: {check(loaded)}")


def checked_keys(config: Path, overrides: Sequence[str]) -> Config:
    """Return a configuration.

    Raises:
        UserError: its keys are refused, together with everything else that `validate` finds.
    """
    try:
        return configuration.load(config, overrides)
    except ConfigError as error:
        if error.rest is not None:
            from asyncmoe.launch.validate import validate as check

            check(error.rest, error)
        raise


def shown(config: Config) -> str:
    """Return a configuration as YAML; loading it gives an equal one. If rollout.max_concurrent is null, a comment gives its value."""
    head = f"# rollout.max_concurrent: {config.max_concurrent}\n" if config.rollout.max_concurrent is None else ""
    return head + str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120))


def json_schema() -> dict[str, object]:
    """Return the JSON schema of configurations."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
