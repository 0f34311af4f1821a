"""A checkpoint's facts about the run that wrote it (`asyncmoe.json`), and the checks before a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncmoe.checkpoints.manifest import unreadable
from asyncmoe.errors import ConfigError, DataError

FACTS = "asyncmoe.json"
_KEYS = {"family": "model.family"}
"""The configuration key of each fact whose name differs from its key."""


def facts(checkpoint: Path) -> dict[str, Any]:
    """Read the facts that `finish` stored with a checkpoint.

    Raises:
        DataError: the facts file is missing or malformed.
        UserError: this process cannot read it.
    """
    path, expected = checkpoint / FACTS, "a checkpoint's facts: a JSON object with an integer step"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(str(path), got=unreadable(path, error), expected=expected) from error
    except (ValueError, RecursionError) as error:
        raise DataError(str(path), got=str(error), expected=expected) from error
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise DataError(str(path), got=str(values)[:80], expected=expected)
    return values


def kind_faults(checkpoint: Path, now: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error, which names the key, for each setting of model family or kind of training that differs from the checkpoint's.

    Args:
        now: the current settings, in the form that `finish` stored; only settings that the checkpoint has are compared.

    Raises:
        DataError: as `facts`.
    """
    saved = facts(checkpoint)
    for name in [name for name in now if name in saved]:
        told, value = saved[name], now[name]
        both = {_KEYS.get(name, name): (told, value)}
        if isinstance(told, dict):
            both = {f"{name}.{key}": (told[key], value[key]) for key in value if key in told}
        for key, (then, got) in both.items():
            if then != got:
                here, there = (one if isinstance(one, str) else json.dumps(one) for one in (got, then))
                hint = f"set {key}={there}, or choose another run.dir"
                yield ConfigError(key, got=here, expected=f"{there}, as {checkpoint.name} has it", hint=hint)
