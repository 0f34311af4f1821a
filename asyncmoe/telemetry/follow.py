"""Read a run's records while they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from asyncmoe.telemetry.records import Tail
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import EVALUATION, METRICS, ROLLOUT, Resume, Step

Followed = Step | Resume | Rollout | Evaluation


class Sink(Protocol):
    """A consumer of new records, such as TensorBoard or Prometheus."""

    def feed(self, records: list[Followed]) -> None:
        """Consume new records, possibly none. Each record comes once; records of one file come in order."""

    def close(self) -> None:
        """Release files and ports."""


class Follower:
    """Tails the metrics, rollout and evaluation records of a run directory, which may not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = Tail(run_dir / METRICS)
        self._rollout = Tail(run_dir / ROLLOUT)
        self._evaluations = Tail(run_dir / EVALUATION)

    def poll(self) -> list[Followed]:
        """Return the records written since the last call.

        Raises:
            DataError: a complete line is malformed; names file and line.
        """
        return [*self._metrics.poll_steps(), *self._rollout.poll_as(Rollout), *self._evaluations.poll_as(Evaluation)]
