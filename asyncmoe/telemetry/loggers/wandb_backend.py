"""Weights & Biases."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncmoe.config.telemetry import WandbSection
from asyncmoe.telemetry.loggers.backend import Opened
from asyncmoe.telemetry.loggers.points import LoggedPoint
from asyncmoe.telemetry.loggers.state import folder

STEP = "step"
EVALUATION_STEP = "evaluation/version"
_INIT_S = 60.0


class Wandb:
    """A run of W&B; implements `Backend`.

    W&B takes a row of its history only if its number is above the last one's, while evaluations come after later steps. So rows are
    numbered in the order of sending, and `step` and `evaluation/version` are the axes of the charts.

    Args:
        directory: run.dir, whose loggers/wandb holds what W&B writes.
        name: the run's name if the configuration has none.
    """

    most = 10_000

    def __init__(self, section: WandbSection, directory: Path, name: str) -> None:
        self._section, self._directory, self._name = section, folder(directory), section.name or name
        self._run: Any = None
        self._rows = 0
        self.target = f"{section.entity or ''}/{section.project}"
        self.later = f"wandb sync {shlex.quote(str(self._directory / 'wandb'))}/*run-*"

    def open(self, id: str | None, points: int, parameters: Mapping[str, Any]) -> Opened:
        """See `Backend`."""
        import wandb

        section = self._section
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=self._name,
            group=section.group,
            tags=list(section.tags) or None,
            id=id or uuid.uuid4().hex[:12],
            resume="allow",
            mode=section.mode,
            dir=self._directory,
            config=dict(parameters),
            # The command line and its output are the sender's, not the run's; source code and its changes are nobody's business.
            settings=wandb.Settings(console="off", init_timeout=_INIT_S, disable_code=True, save_code=False, silent=True),
        )
        self._rows = points
        self._run.define_metric(STEP)
        self._run.define_metric(EVALUATION_STEP)
        self._run.define_metric("evaluation/*", step_metric=EVALUATION_STEP)
        self._run.define_metric("*", step_metric=STEP)
        return Opened(self._run.id, self._run.url or "")

    def log(self, points: Sequence[LoggedPoint]) -> str | None:
        """See `Backend`."""
        for point in points:
            axis = {STEP: point.step} if point.evaluation is None else {}
            self._run.log({**point.values, **axis, "_timestamp": point.time}, step=self._rows, commit=True)
            self._rows += 1
        return None

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """See `Backend`."""
        import wandb

        shown = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({name: shown, STEP: step}, step=self._rows, commit=True)
        self._rows += 1

    def close(self, complete: bool) -> str | None:
        """See `Backend`."""
        import wandb

        self._run.finish(exit_code=0 if complete else 1)
        wandb.teardown()  # `finish` may return before the service has written the last rows of an offline run
        return None
