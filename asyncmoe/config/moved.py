"""The configuration of a run by the directory it is in now: a run may have been moved, copied or renamed since it was written there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from asyncmoe.config.loading import load_as
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, UserError

FILE = "config.yaml"
"""The configuration in a run's directory, with all defaults and overrides."""
_SIGNS = ("checkpoints", "metrics.jsonl", "logs", "processes")
"""What a directory of a run has besides; a folder with a file config.yaml alone is no run."""


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run."""
    return path.is_dir() and (path / FILE).is_file() and any((path / name).exists() for name in _SIGNS)


def of_run(run_dir: Path, overrides: Sequence[str] = (), *, idle: bool = True) -> Config:
    """Return the configuration with which a run was last started, for the directory in which it is now.

    `run.dir` is `run_dir`, unless an override names another one. Every path below the former `run.dir`, as of a model that the run made,
    is the same path below `run_dir`.

    Args:
        idle: as for `asyncmoe.config.loading.load_as`; False if the run is to go on.

    Raises:
        UserError: the directory is not a run's.
        ConfigError: as `asyncmoe.config.load`.
    """
    file = run_dir / FILE
    if not file.is_file():
        raise UserError("RUN", got=f"{run_dir}, which has no {FILE}", expected="the directory of a run")
    former = load_as(Config, file, idle=True).run.dir
    config = load_as(Config, file, overrides, idle=idle)
    moved: Config = _moved(config, former, run_dir)
    return config if _names_dir(overrides) else moved


def check_place(file: Path, overrides: Sequence[str]) -> None:
    """Refuse to start from the configuration in a run's directory if it names another directory: another run would start, or go on.

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


def _moved(value: Any, former: Path, now: Path) -> Any:
    """Return a value of the configuration with `now` in place of `former` at the beginning of every path in it."""
    if isinstance(value, Path):
        return now / value.relative_to(former) if value.is_relative_to(former) else value
    if isinstance(value, BaseModel):
        parts = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: new for name, part in parts.items() if (new := _moved(part, former, now)) != part}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, Mapping):
        return {key: _moved(part, former, now) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(part, former, now) for part in value)
    return value
