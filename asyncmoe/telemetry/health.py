"""Whether a run is well: what `/health` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from asyncmoe.telemetry.alerts import Told
from asyncmoe.telemetry.heartbeats import Silence, ends_the_run

Status = Literal["ok", "degraded", "failing"]


class Health(msgspec.Struct, frozen=True):
    """The answer of `/health`, with HTTP status 503 if `status` is "failing", else 200.

    `status`: "failing" if the controller or a trainer rank is silent for watch.stacks_after_s, or there is no step for
    watch.alerts.no_step_s; "degraded" if an engine is silent, or lost and has not started again, if a rollout worker is lost and has
    not joined again, or if the latest step broke a rule of verify.anomalies.
    """

    status: Status
    step: int
    seconds_since_step: float
    why: tuple[str, ...] = ()
    processes: dict[str, float] = {}
    """Seconds of silence by role."""


def health(told: Told, silences: Sequence[Silence], limit_s: float, now: float) -> Health:
    """Judge a run.

    Args:
        limit_s: seconds of silence from which a process counts as silent.
        now: on the clock of `told`.
    """
    silent = [one for one in silences if one.seconds > limit_s]
    failing = [str(one) for one in silent if ends_the_run(one.role)]
    since = 0.0 if told.stepped is None else now - told.stepped
    if told.late:
        failing.append(f"no step for {since:.0f} s")
    degraded = [str(one) for one in silent if not ends_the_run(one.role)]
    degraded += [f"{told.missing} engine(s) lost"] if told.missing else []
    degraded += [f"{told.workers_missing} rollout worker(s) lost"] if told.workers_missing else []
    degraded += [f"the latest step broke verify.anomalies: {', '.join(sorted(told.anomalies))}"] if told.anomalies else []
    status: Status = "failing" if failing else "degraded" if degraded else "ok"
    return Health(status, told.step, round(since, 1), (*failing, *degraded), {one.role: round(one.seconds, 1) for one in silences})


def answer(found: Health) -> tuple[int, bytes, str]:
    """Return HTTP status, body and type of the answer."""
    body: Any = msgspec.json.format(msgspec.json.encode(found), indent=1)
    return (503 if found.status == "failing" else 200), body + b"\n", "application/json"
