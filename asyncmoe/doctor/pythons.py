"""The contents of a Python environment, found by running `python_probe` in it, and asyncmoe's requirements."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asyncmoe.doctor import programs, python_probe
from asyncmoe.doctor.facts import PythonFacts
from asyncmoe.engines.engine_python import engine_python
from asyncmoe.errors import UserError
from asyncmoe.installed import fix

LOOK_S = 180.0
"""Timeout in seconds; importing torch and Transformer Engine from a file system that all nodes read at once takes about a minute."""
_WITHOUT_TORCH_S = 60.0


@dataclass(frozen=True)
class Declared:
    """The specifiers by name, and the names that trainer and controller need."""

    specifiers: Mapping[str, str]
    train: tuple[str, ...]


def declared(checkout: Path) -> Declared:
    """Read the requirements of the checkout, or of the installation if there is no pyproject.toml."""
    file = checkout / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        train, others = [*project["dependencies"], *extras["train"]], [*extras["engine"], *extras["gpu"]]
    else:
        lines = importlib.metadata.requires("asyncmoe") or []
        train, others = _asked(lines, "train"), _asked(lines, "engine", "gpu")
    needed = _specifiers(train)
    return Declared({**_specifiers(others), **needed}, tuple(needed))


def check_engine_python(configured: Path | None) -> None:
    """Check that the engines' Python has what an engine imports first. Takes about a second.

    Raises:
        UserError: it is not a Python, does not respond, or lacks SGLang or asyncmoe with its extension.
    """
    python = engine_python(configured)
    found = look(str(python), ["sglang"], _WITHOUT_TORCH_S)
    if found.extension is None:
        lacks = [found.unfinished or "no answer of a Python"]
    else:
        lacks = [] if "sglang" in found.packages else ["SGLang is not installed"]
        lacks += [found.extension.trouble] if found.extension.trouble is not None else []
    if lacks:
        beside = f"or write {Path(__file__).parents[2]} into a .pth file in its site-packages if only asyncmoe is missing"
        wanted, hint = "a Python that has SGLang and asyncmoe", f"run: {fix('engine', python=python)}, {beside}"
        raise UserError("engines.python", got=f"{python}: {'; '.join(lacks)}", expected=wanted, hint=hint)


def look(executable: str, names: Sequence[str], seconds: float = LOOK_S) -> PythonFacts:
    """Return the facts of a Python: the versions of the packages in `names`, and how far its imports succeed."""
    output = programs.run([executable, "-", *names], seconds, Path(python_probe.__file__).read_text(encoding="utf-8"))
    return read(executable, output)


def read(executable: str, output: programs.Output) -> PythonFacts:
    """Parse the facts from the output of `python_probe`, ignoring the output of its imports."""
    fields: dict[str, Any] = {}
    for line in output.text.splitlines(keepends=True):
        if line.startswith(python_probe.MARK) and line.endswith("\n"):
            fields |= json.loads(line.removeprefix(python_probe.MARK))
    step = fields.pop("step", None)
    return msgspec.convert({"executable": executable, **fields, "unfinished": _unfinished(output, step)}, PythonFacts)


def _unfinished(output: programs.Output, step: str | None) -> str | None:
    """Return the step at which the probe failed and the reason: the exception's message, or how the process ended."""
    if output.trouble is None:
        return None
    said = programs.last_line(output.errors)
    why = said if "Traceback (most recent call last)" in output.errors else f"{output.trouble}: {said}".removesuffix(": ")
    return f"{step}: {why}" if step else why


def _specifiers(lines: Iterable[str]) -> dict[str, str]:
    """Return the version specifier by package, except asyncmoe itself, which an extra names to include another extra."""
    found = {str(canonicalize_name(wanted.name)): str(wanted.specifier) for wanted in map(Requirement, lines)}
    return {name: specifier for name, specifier in found.items() if name != "asyncmoe"}


def _asked(lines: Iterable[str], *extras: str) -> list[str]:
    """Return the requirements of the given extras and those outside any extra."""
    markers = [(line, Requirement(line).marker) for line in lines]
    return [line for line, marker in markers if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)]
