"""The arguments of `asyncmoe simulate`, and the run itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncmoe.config.loading import load_as
from asyncmoe.simulate.compare import Comparison, compare
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.recorded import RecordedRun
from asyncmoe.simulate.sweep import Sweep, sweep
from asyncmoe.simulate.workload import parse


def run(plant: Plant, swept: bool, known: Sequence[str] = ()) -> Comparison | Sweep:
    """Return a sweep, or a comparison of all modes.

    Args:
        known: cautions about the plant itself, which come first in those of the result.

    Raises:
        ConfigError: a workload file that is not a list of lengths.
        InvariantBroken: see `asyncmoe.simulate.simulation.simulate`.
    """
    drawn = parse(plant.workload)
    found = sweep(plant, drawn) if swept else compare(plant, drawn)
    return replace(found, cautions=(*known, *found.cautions))


def read_plant(arguments: Sequence[str], trace: RecordedRun | None = None) -> Plant:
    """Read the plant from `[PLANT] [KEY=VALUE]...`; without a file every key has its default.

    Args:
        trace: a run whose records take the place of the file's values; `KEY=VALUE` takes precedence over both.

    Raises:
        ConfigError: a file, key or value that is refused; see `asyncmoe.config.loading.load_as`.
    """
    values = {} if trace is None else {"workload": str(trace.path), **trace.keys}
    recorded = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if arguments and "=" not in arguments[0]:
        return load_as(Plant, Path(arguments[0]), [*recorded, *arguments[1:]])
    return load_as(Plant, None, [*recorded, *arguments])
