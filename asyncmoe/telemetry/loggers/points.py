"""Convert records to points: named values of a step, as every logger takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from asyncmoe.telemetry.metric import numbers
from asyncmoe.telemetry.records import Followed, sessions
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Resume, Step


@dataclass(frozen=True)
class LoggedPoint:
    """Values of one step.

    Attributes:
        step: the trainer's step; of an evaluation, the evaluated version.
        time: Unix seconds.
        values: by name. A step's names are the fields of metrics.jsonl ("loss", "ages/0"), and those of the newest rollout record up to
            then, with the prefix "rollout/". Names of an evaluation's values have the prefix "evaluation/".
        evaluation: True for values of an evaluation.
    """

    step: int
    time: float
    values: Mapping[str, float]
    evaluation: bool = False


class Sent(msgspec.Struct, frozen=True):
    """What a logger has been sent: the last step, the time of the last evaluation, and the number of points.

    A step is sent once: after a resume from an earlier checkpoint, the repeated steps are skipped, because no logger can retract a value.
    metrics.jsonl has them all.
    """

    step: int = 0
    evaluated: float = 0.0
    points: int = 0

    def has(self, point: LoggedPoint) -> bool:
        """Return whether the point, or a later one of its kind, was sent."""
        return point.time <= self.evaluated if point.evaluation else point.step <= self.step

    def plus(self, point: LoggedPoint) -> Sent:
        """Return what will have been sent when this point is sent, too."""
        step, evaluated = (self.step, point.time) if point.evaluation else (point.step, self.evaluated)
        return Sent(step, evaluated, self.points + 1)


class Points:
    """Turns records, in the order of `Follower.poll`, into points."""

    def __init__(self) -> None:
        self._rollout: deque[Rollout] = deque()
        self._newest: Rollout | None = None

    def take(self, records: Sequence[Followed]) -> list[LoggedPoint]:
        """Return the points of new records, by time."""
        self._rollout.extend(record for record in records if isinstance(record, Rollout))
        steps = chain.from_iterable(sessions(record for record in records if isinstance(record, Step | Resume)))
        evaluations = [record for record in records if isinstance(record, Evaluation)]
        return sorted(chain(map(self._step, steps), map(_evaluation, evaluations)), key=lambda one: one.time)

    def _step(self, record: Step) -> LoggedPoint:
        while self._rollout and self._rollout[0].time <= record.time:
            self._newest = self._rollout.popleft()
        values = _named("", record)
        if self._newest is not None:
            values |= _named("rollout/", self._newest)
        return LoggedPoint(record.step, record.time, values)


def _evaluation(record: Evaluation) -> LoggedPoint:
    prefix = f"evaluation/{record.name}/" if record.name else "evaluation/"
    return LoggedPoint(record.version, record.time, _named(prefix, record), evaluation=True)


def _named(prefix: str, record: msgspec.Struct) -> dict[str, float]:
    return {f"{prefix}{one.name}" if one.key is None else f"{prefix}{one.name}/{one.key}": one.value for one in numbers(record)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key. An empty mapping stays as it is."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
