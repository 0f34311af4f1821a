"""`asyncmoe bench step`: run a configuration for some minutes in a directory of its own, without anything that a run keeps, and measure the
speed of its trainer and engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.config import Config
from asyncmoe.errors import Interrupted
from asyncmoe.launch import local
from asyncmoe.launch.run_processes import RunParts
from asyncmoe.launch.watch import Stopping, begins, watch
from asyncmoe.models.hub import with_local_model
from asyncmoe.plan import memory
from asyncmoe.telemetry import run as records
from asyncmoe.telemetry.records import read_steps
from asyncmoe.telemetry.schema import METRICS
from asyncmoe.telemetry.speeds import SETTLING, described, speeds

_ALONE = (
    *("run.steps=100000", "run.new_data_at=null", "run.controller_restarts=0", "warmup.steps=0", "evaluation.every=0", "launch=local"),
    *("cluster={}", "watch={}", "log.folder=null", "log.redis=null", "log.keep=null", "engines.join=false"),
    *("trainer.checkpoint_every=0", "trainer.checkpoint_copy=null", "trainer.max_restarts=0", "sync.directory=null"),
    "telemetry={tensorboard: 'off', samples: {groups: 0}}",
)
"""Keys of the measuring run: all its processes are on this machine, it keeps nothing, and it ends before its last step."""


def measure(path: Path, overrides: Sequence[str], minutes: float) -> dict[str, Any]:
    """Run a configuration until its steps after the first `SETTLING` have taken `minutes`, print its speeds, and return them.

    Its directory is beside `run.dir`. It is deleted, unless the run fails or is stopped.

    Raises:
        AsyncmoeError: as of a run (`local.run`).
    """
    place = configuration.load(path, overrides).run.dir
    place = place.parent / f"{place.name}-bench-{os.getpid()}"
    config = with_local_model(configuration.load(path, (*overrides, *_ALONE, f"run.dir={place}")))
    local.run(config, partial(_watch, minutes))
    run = records.load(place)
    found = speeds(config, memory.whole(models.hf_config_of(config)).all, run.rl, run.rollout)
    shutil.rmtree(place)
    print(described(found))
    return found


def _watch(minutes: float, config: Config, parts: RunParts, end: Callable[[], None]) -> dict[str, object]:
    """Supervise the run until it has taken its steps."""

    def enough() -> Interrupted | None:
        counted = read_steps(config.run.dir / METRICS)[SETTLING:]
        return Interrupted("measured") if counted and counted[-1].time - counted[0].begin >= 60 * minutes else None

    print(f"{begins(config)}\nmeasuring for {minutes:g} minutes from step {SETTLING + 1} on; the run then ends", flush=True)
    with suppress(Interrupted):
        watch(config, parts, end, Stopping(lambda: False, lambda: 0, enough, lambda _: False))
    return {}
