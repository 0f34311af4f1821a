"""Inspect a Python environment by running `python_probe` in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe.doctor.environment import PythonFacts
from asyncmoe.doctor.probes import python_probe, shell

LOOK_S = 180.0
"""Timeout in seconds; importing torch and Transformer Engine from a file system that all nodes read at once takes a minute."""


def look(executable: str, names: Sequence[str], seconds: float = LOOK_S) -> PythonFacts:
    """Return the facts of a Python: the versions of the packages in `names`, and how far its imports succeed."""
    output = shell.run([executable, "-", *names], seconds, Path(python_probe.__file__).read_text(encoding="utf-8"))
    return read(executable, output)


def read(executable: str, output: shell.Output) -> PythonFacts:
    """Parse the facts from the output of `python_probe`, ignoring the output of its imports."""
    fields: dict[str, Any] = {}
    for line in output.text.splitlines():
        if line.startswith("{"):
            fields |= _object(line)
    step = fields.pop("step", None)
    return msgspec.convert({"executable": executable, **fields, "unfinished": _unfinished(output, step)}, PythonFacts)


def _unfinished(output: shell.Output, step: str | None) -> str | None:
    """Return the step at which the probe failed and the reason: the exception's message, or how the process ended."""
    if output.trouble is None:
        return None
    raised = shell.last_line(output.errors) if "Traceback (most recent call last)" in output.errors else ""
    return f"{step}: {raised or output.trouble}" if step else raised or output.trouble


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return {}
    known = {*PythonFacts.__dataclass_fields__, "step"}
    return found if isinstance(found, dict) and found.keys() <= known else {}
