"""Validation of the arguments of `asyncmoe simulate`, and the run itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from asyncmoe.errors import ConfigError, DataError
from asyncmoe.simulate.compare import Comparison, compare
from asyncmoe.simulate.plant import LANDINGS, MODES, Landing, Mode, Plant
from asyncmoe.simulate.sweep import Sweep, sweep
from asyncmoe.simulate.workload import Workload


def run(plant: Plant, workload: Workload, mode: str, etas: Sequence[int]) -> Comparison | Sweep:
    """Return a sweep over `etas`, or a comparison of modes if `etas` is empty.

    Raises:
        ConfigError: an unknown mode.
        InvariantBroken: see `asyncmoe.simulate.simulation.simulate`.
    """
    wanted = modes(mode)
    return sweep(plant, workload, etas) if etas else compare(plant, workload, wanted)


def modes(text: str) -> tuple[Mode, ...]:
    """Return the modes that `text` names, or every mode for `all`. Raises ConfigError for an unknown mode."""
    found = tuple(mode for mode in MODES if text in (mode, "all"))
    if not found:
        raise ConfigError("--mode", got=repr(text), expected=f"all or one of {', '.join(MODES)}")
    return found


def landing(text: str) -> Landing:
    """Return `text` as a landing. Raises ConfigError for an unknown landing."""
    for known in LANDINGS:
        if text == known:
            return known
    raise ConfigError("--landing", got=repr(text), expected=f"one of {', '.join(LANDINGS)}")


def sync_seconds(given: float, plan: Path | None) -> float:
    """Return the seconds of a weight update: `given`, or the fastest method in a file of `asyncmoe plan --json`.

    Raises:
        ConfigError: both are given.
        DataError: the file is missing or is not such a plan.
    """
    if plan is None:
        return given
    if given:
        raise ConfigError("--sync-s and --sync-plan", got="both", expected="one of them")
    try:
        return min(float(way["nic_seconds"]) for way in json.loads(plan.read_text())["ways"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(str(plan), got=repr(error), expected="what asyncmoe plan --json has written") from error


def etas(text: str) -> tuple[int, ...]:
    """Parse a list like `1,2,4`. Raises ConfigError for anything else."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
        raise ConfigError("--etas", got=repr(text), expected="whole numbers like 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))
