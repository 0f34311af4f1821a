"""Looking inside a Python environment by running `inside` in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe.launch.doctor.facts import Python
from asyncmoe.launch.doctor.gathering import inside, shell

LOOK_S = 180.0
"""torch and Transformer Engine from a file system that all nodes read at once take a minute."""


def look(executable: str, names: Sequence[str], seconds: float = LOOK_S) -> Python:
    """What that Python has of some packages, and how far its imports come."""
    output = shell.run([executable, "-", *names], seconds, Path(inside.__file__).read_text(encoding="utf-8"))
    return read(executable, output)


def read(executable: str, output: shell.Output) -> Python:
    """The facts out of what `inside` printed, whatever else its imports printed."""
    fields: dict[str, Any] = {}
    for line in output.text.splitlines():
        if line.startswith("{"):
            fields |= _object(line)
    step = fields.pop("step", None)
    unfinished = output.trouble and (f"{step}: {_without(executable, output.trouble)}" if step else output.trouble)
    return msgspec.convert({"executable": executable, **fields, "unfinished": unfinished}, Python)


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return {}
    known = {*Python.__dataclass_fields__, "step"}
    return found if isinstance(found, dict) and found.keys() <= known else {}


def _without(executable: str, trouble: str) -> str:
    """What happened, without the program's name and the status of every traceback."""
    return trouble.removeprefix(f"{executable} ").removeprefix("ended with status 1: ")
