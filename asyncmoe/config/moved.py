"""The configuration of a run, adapted to the directory the run is in now: the run may have been moved, copied or renamed since its
start."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asyncmoe.config.loading import load_as
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, UserError

FILE = "config.yaml"
"""The configuration in a run's directory, with all defaults and overrides."""
_SIGNS = ("checkpoints", "metrics.jsonl", "trained.jsonl", "logs", "processes")
"""A run's directory also has at least one of these; a folder with config.yaml alone is not a run."""


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run."""
    return os.path.isfile(path / FILE) and any((path / name).exists() for name in _SIGNS)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a run to start or resume.

    Args:
        path: the run's YAML file, as for `asyncmoe.config.loading.load_as`, or the directory of a run, as for `of_run`.
    """
    return of_run(path, overrides, idle=False) if is_run(path) else load_as(Config, path, overrides)


def of_run(run_dir: Path, overrides: Sequence[str] = (), *, idle: bool = True, file: Path | None = None) -> Config:
    """Return the configuration with which a run was last started, for the directory in which it is now.

    `run.dir` is `run_dir`, unless an override sets it. Every path below the former `run.dir`, such as that of a model the run made, becomes
    the same path below `run_dir`.

    Args:
        file: another configuration of the run; None: the newest.
        idle: as for `asyncmoe.config.loading.load_as`; False to resume the run.

    Raises:
        UserError: the directory is not a run's.
        ConfigError: as `asyncmoe.config.load`.
    """
    file = file or run_dir / FILE
    if not file.is_file():
        raise UserError("RUN", got=f"{run_dir}, which has no {FILE}", expected="the directory of a run")
    former = load_as(Config, file, idle=True).run.dir
    config = load_as(Config, file, overrides, idle=idle)
    moved: Config = _each_path(config, lambda _, path: run_dir / path.relative_to(former) if path.is_relative_to(former) else path)
    return config if _names_dir(overrides) else moved


def absolute(config: Config) -> Config:
    """Return the configuration with absolute paths, so that it means the same in every directory. A `path` that does not exist stays: it is
    an id on the Hugging Face hub."""
    return Config.model_validate(_each_path(config, lambda key, path: path if key == "path" and not path.exists() else path.absolute()))


def check_place(file: Path, overrides: Sequence[str]) -> None:
    """Refuse to start from a run's own configuration if it names another run.dir, where another run would start or resume.

    Raises:
        ConfigError: the run was moved or copied, and no override names its directory.
    """
    place = file.parent
    if file.name != FILE or not is_run(place) or _names_dir(overrides):
        return
    named = load_as(Config, file, idle=True).run.dir
    if named.resolve() != place.resolve():
        hint = f"the run was moved or copied: give {place} instead of the file, or name a directory with run.dir="
        raise ConfigError(f"{file}: run.dir", got=named, expected=place, hint=hint)


def _names_dir(overrides: Sequence[str]) -> bool:
    return any(override.startswith("run.dir=") for override in overrides)


def _each_path(value: Any, change: Callable[[str, Path], Path], key: str = "") -> Any:
    """Return a value of the configuration with every path in it changed. `change` gets the last part of the key, and the path."""
    if isinstance(value, Path):
        return change(key, value)
    if isinstance(value, BaseModel):
        parts = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: new for name, part in parts.items() if (new := _each_path(part, change, name)) != part}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, Mapping):
        return {name: _each_path(part, change, name) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each_path(part, change, key) for part in value)
    return value
