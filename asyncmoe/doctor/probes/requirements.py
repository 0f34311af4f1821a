"""asyncmoe's declared requirements, from pyproject.toml of a checkout, else from the installed package's metadata."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_TRAIN, _OTHERS = "train", ("engine", "gpu")


@dataclass(frozen=True)
class Declared:
    """asyncmoe's version, the specifiers by name (including `python`), and the names that trainer and controller need."""

    version: str
    specifiers: Mapping[str, str]
    train: tuple[str, ...]


def declared(checkout: Path) -> Declared:
    """Read the requirements of the checkout, or of the installation if there is no pyproject.toml."""
    file = checkout / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        needed = [*project["dependencies"], *extras[_TRAIN]]
        return _declared(project["version"], project["requires-python"], needed, [line for extra in _OTHERS for line in extras[extra]])
    metadata = importlib.metadata.metadata("asyncmoe")
    lines = importlib.metadata.requires("asyncmoe") or []
    return _declared(metadata["Version"], metadata["Requires-Python"], _asked(lines, _TRAIN), _asked(lines, *_OTHERS))


def _declared(version: str, python: str, train: Iterable[str], others: Iterable[str]) -> Declared:
    needed, more = _specifiers(train), _specifiers(others)
    more.pop("asyncmoe", None)
    return Declared(version, {"python": python, **more, **needed}, tuple(needed))


def _specifiers(lines: Iterable[str]) -> dict[str, str]:
    return {str(canonicalize_name(wanted.name)): str(wanted.specifier) for wanted in map(Requirement, lines)}


def _asked(lines: Iterable[str], *extras: str) -> list[str]:
    """Return the requirements of the given extras and those outside any extra."""
    markers = [(line, Requirement(line).marker) for line in lines]
    return [line for line, marker in markers if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)]
