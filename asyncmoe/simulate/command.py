"""The arguments of `asyncmoe simulate`, and the run itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncmoe.config.loading import load_as, read
from asyncmoe.config.schema import Config
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.simulate.compare import Comparison, compare
from asyncmoe.simulate.plant import MODES, Mode, Plant
from asyncmoe.simulate.recorded import RecordedRun
from asyncmoe.simulate.sweep import Sweep, sweep
from asyncmoe.simulate.workload import parse

BOUNDS = (1, 2, 4, 8)
"""Values of max_staleness that --sweep tries by default."""
_OPTIONS = ("--sweep", "--staleness", "--mode", "--json", "--plot", "--trace")
_KEYS = {
    "--workload": "workload",
    "--groups": "groups_per_step",
    "--group-size": "group_size",
    "--eta": "max_staleness",
    "--queue-capacity": "queue_capacity",
    "--steps": "steps",
    "--seed": "seed",
    "--engines": "engines.count",
    "--gpus-per-engine": "engines.gpus",
    "--concurrency": "engines.max_running",
    "--step-s": "engines.step_s",
    "--step-batch": "engines.step_batch",
    "--prefill-s": "engines.prefill_s",
    "--trainer-gpus": "trainer.gpus",
    "--train-s": "trainer.step_s",
    "--sync-s": "sync.seconds",
    "--sync-plan": "sync.plan",
    "--pause-s": "sync.pause_s",
    "--landing": "sync.landing",
    "--score-s": "scoring.seconds",
    "--score-sigma": "scoring.sigma",
    "--score-concurrency": "scoring.concurrency",
    "--score-failure": "failures.scoring",
    "--engine-mtbf-s": "failures.engine_mtbf_s",
    "--trainer-failure": "failures.trainer",
    "--jitter": "failures.jitter",
}
"""The key of each former option."""
_NULL_FOR_0 = ("--queue-capacity", "--score-concurrency", "--engine-mtbf-s")


def run(plant: Plant, mode: str, bounds: Sequence[int], known: Sequence[str] = ()) -> Comparison | Sweep:
    """Return a sweep over `bounds` of the staleness, or a comparison of modes if there are none.

    Args:
        known: cautions about the plant itself, which come first in those of the result.

    Raises:
        ConfigError: an unknown mode, a workload file that is not a list of lengths, or a sweep with engines that come and go.
        DataError: `sync.plan` is not a plan.
        InvariantBroken: see `asyncmoe.simulate.simulation.simulate`.
    """
    wanted, drawn = modes(mode), parse(plant.workload)
    if bounds and plant.scaling.first is not None:
        raise ConfigError("scaling.first", got=plant.scaling.first, expected="null with --sweep, which looks for a fixed number of engines")
    if plant.sync.plan is not None:
        plant = plant.having({"sync.seconds": sync_seconds(plant.sync.plan), "sync.plan": None})
    found = sweep(plant, drawn, bounds) if bounds else compare(plant, drawn, wanted)
    return replace(found, cautions=tuple(dict.fromkeys((*known, *drawn.notes, *found.cautions))))


def read_plant(arguments: Sequence[str], trace: RecordedRun | None = None) -> Plant:
    """Read the plant from `[PLANT] [KEY=VALUE]...`; without a file every key has its default.

    Args:
        trace: a run whose records take the place of the file's values; `KEY=VALUE` takes precedence over both.

    Raises:
        ConfigError: a former or unknown option, or a file, key or value that is refused; see `asyncmoe.config.loading.load_as`.
    """
    _refuse_options(arguments)
    recorded = [] if trace is None else [f"workload={json.dumps(str(trace.path))}", *_overrides(trace.keys)]
    if arguments and "=" not in arguments[0]:
        path = Path(arguments[0])
        _refuse_run(path)
        return load_as(Plant, path, [*recorded, *arguments[1:]])
    return load_as(Plant, None, [*recorded, *arguments])


def _overrides(keys: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def modes(text: str) -> tuple[Mode, ...]:
    """Return the modes that `text` names, or every mode for `all`. Raises ConfigError for an unknown mode."""
    found = tuple(mode for mode in MODES if text in (mode, "all"))
    if not found:
        raise ConfigError("--mode", got=repr(text), expected=f"all or one of {', '.join(MODES)}")
    return found


def sync_seconds(plan: Path) -> float:
    """Return the seconds of an update in a file of `asyncmoe plan --json`. Raises DataError if it is missing or no such file."""
    try:
        return float(json.loads(plan.read_text())["way"]["nic_seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(str(plan), got=repr(error), expected="what asyncmoe plan --json has written") from error


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


def _refuse_options(arguments: Sequence[str]) -> None:
    """Raise ConfigError if there are options among the arguments; former options are named with their keys."""
    words, given, keys = iter(arguments), [], []
    for word in words:
        if not word.startswith("-"):
            continue
        name, separator, value = word.partition("=")
        if name != "--etas" and name not in _KEYS:
            raise ConfigError("asyncmoe simulate", got=f"an unknown option {name}", expected=f"KEY=VALUE or one of {', '.join(_OPTIONS)}")
        value = value if separator else next(words, "VALUE")
        given.append(f"{name} {value}")
        if name == "--etas":
            keys += ["--staleness", value]
        else:
            keys.append(f"{_KEYS[name]}={'null' if value == '0' and name in _NULL_FOR_0 else value}")
    if given:
        hint = "the plant is described by keys, in a file or on the command line: asyncmoe simulate --help"
        raise ConfigError("asyncmoe simulate", got=" ".join(given), expected=shlex.join(keys), hint=hint)
