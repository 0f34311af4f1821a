"""The arguments of `asyncmoe simulate`, and the run itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncmoe.config.loading import load_as, read
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError
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
    return replace(found, cautions=tuple(dict.fromkeys((*known, *drawn.notes, *found.cautions))))


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
        path = Path(arguments[0])
        _refuse_run(path)
        return load_as(Plant, path, [*recorded, *arguments[1:]])
    return load_as(Plant, None, [*recorded, *arguments])


def _refuse_run(path: Path) -> None:
    """Raise ConfigError if the file describes a run: it has the sections that every run needs."""
    values, _ = read(path)
    needed = [name for name, field in Config.model_fields.items() if field.is_required()]
    if values.keys() >= set(needed):
        raise ConfigError(
            str(path),
            got=f"the configuration of a run ({', '.join(needed)})",
            expected="a plant: how many engines and trainer GPUs there are, and how fast they are",
            hint="examples/plant.yaml is one, docs/simulate.md lists its keys; asyncmoe plan --config takes the configuration of a run",
        )
