"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe.telemetry.loggers.points import LoggedPoint

STEP = "step"
EVALUATION_STEP = "evaluation/version"
_INIT_S = 60.0


class Wandb:
    """A run of W&B; implements `LoggerClient`. W&B itself keeps what it cannot send, and reads WANDB_MODE and its other variables.

    W&B accepts a row of a run's history only if its number is above the previous row's, but evaluations come after later steps. So rows are
    numbered in the order of sending, and `step` and `evaluation/version` are the axes of the charts.

    Args:
        folder: for the files that W&B writes.
        name: the run's name.
    """

    def __init__(self, project: str, folder: Path, name: str) -> None:
        self._project, self._folder, self._name = project, folder, name
        self._run: Any = None
        self._rows = 0

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> tuple[str, str]:
        """See `LoggerClient`."""
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            id=id or uuid.uuid4().hex[:12],
            resume="allow",
            dir=self._folder,
            config=dict(parameters),
            # Terminal output is not sent: it is not only the run's. Source code and its changes must stay private.
            settings=wandb.Settings(console="off", init_timeout=_INIT_S, disable_code=True, save_code=False, silent=True),
        )
        self._rows = points
        self._run.define_metric(STEP)
        self._run.define_metric(EVALUATION_STEP)
        self._run.define_metric("evaluation/*", step_metric=EVALUATION_STEP)
        self._run.define_metric("*", step_metric=STEP)
        return self._run.id, self._run.url or ""

    def log(self, point: LoggedPoint) -> None:
        """See `LoggerClient`."""
        axis = {} if point.evaluation else {STEP: point.step}
        self._run.log({**point.values, **axis, "_timestamp": point.time}, step=self._rows, commit=True)
        self._rows += 1

    def close(self, complete: bool) -> None:
        """See `LoggerClient`."""
        import wandb

        self._run.finish(exit_code=0 if complete else 1)
        wandb.teardown()  # `finish` may return before the service has written the last rows of an offline run
