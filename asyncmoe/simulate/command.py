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
from asyncmoe.simulate.plant import MODES, Mode, Plant
from asyncmoe.simulate.recorded import RecordedRun
from asyncmoe.simulate.sweep import Sweep, sweep
from asyncmoe.simulate.workload import parse

BOUNDS = (1, 2, 4, 8)
"""Values of max_staleness that --sweep tries by default."""


def run(plant: Plant, mode: str, bounds: Sequence[int], known: Sequence[str] = ()) -> Comparison | Sweep:
    """Return a sweep over `bounds` of the staleness, or a comparison of modes if there are none.

    Args:
        known: cautions about the plant itself, which come first in those of the result.

    Raises:
        ConfigError: an unknown mode, or a workload file that is not a list of lengths.
        InvariantBroken: see `asyncmoe.simulate.simulation.simulate`.
    """
    wanted, drawn = modes(mode), parse(plant.workload)
    found = sweep(plant, drawn, bounds) if bounds else compare(plant, drawn, wanted)
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


def modes(text: str) -> tuple[Mode, ...]:
    """Return the modes that `text` names, or every mode for `all`. Raises ConfigError for an unknown mode."""
    found = tuple(mode for mode in MODES if text in (mode, "all"))
    if not found:
        raise ConfigError("--mode", got=repr(text), expected=f"all or one of {', '.join(MODES)}")
    return found


def staleness_bounds(text: str | None, sweep: bool) -> tuple[int, ...]:
    """Return the bounds to sweep over, none without --sweep. Raises ConfigError unless `text` is None or a list like `1,2,4`."""
    if text is None:
        return BOUNDS if sweep else ()
    if not sweep:
        raise ConfigError("--staleness", got="it without --sweep", expected=f"both, or max_staleness={text} for one value")
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
        raise ConfigError("--staleness", got=repr(text), expected="whole numbers like 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))


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
