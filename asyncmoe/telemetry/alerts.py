"""Alerts about events of a run: `tell` raises them, and `Alarm` passes them to `watch.alerts.command`."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal

from asyncmoe.telemetry.records import Followed
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step

_TIMEOUT_S = 10.0
"""Seconds that the command may take for one alert."""
NO_STEP_S = 1800.0
"""Seconds without a step after which `no_step` is raised, once."""
Event = Literal["failed", "silent", "no_step", "engine_lost", "worker_lost", "trainer_lost", "controller_lost", "anomaly"]
"""failed: the run ended with an error; silent: a process is silent for watch.stacks_after_s; no_step: no step for `NO_STEP_S`; engine_lost:
an engine died or was fenced; worker_lost: a rollout worker does not answer any more; trainer_lost, controller_lost: the trainer or the
controller was lost and is restarted; anomaly: a step broke a rule of verify."""


@dataclass(frozen=True)
class Alert:
    """An event in words, and the steps taken until then."""

    event: Event
    text: str
    step: int


@dataclass(frozen=True)
class Told:
    """State of the run's alerts, so that nothing is reported twice.

    Attributes:
        step: steps taken.
        stepped: seconds, on the clock of `now`, of the latest step or of the start; None before the first call.
        lost: engines lost since the controller started.
        workers: rollout workers lost since the controller started.
        late: `no_step` has been raised.
        anomalies: rules of `verify` that the previous step broke.
    """

    step: int = 0
    stepped: float | None = None
    lost: int = 0
    workers: int = 0
    late: bool = False
    anomalies: frozenset[str] = frozenset()


def tell(told: Told, records: Sequence[Followed], now: float) -> tuple[Told, list[Alert]]:
    """Return the state after new records, and the alerts that they raise.

    Args:
        now: seconds on any steady clock.
    """
    alerts: list[Alert] = []
    told = replace(told, stepped=now) if told.stepped is None else told
    for record in records:
        if isinstance(record, Step):
            broken = frozenset(record.anomalies or ())
            if new := sorted(broken - told.anomalies):
                values = ", ".join(f"{rule} {(record.anomalies or {})[rule] or float('nan'):.4g}" for rule in new)
                skipped = "; the batch was left untrained" if record.skipped_updates else ""
                alerts.append(Alert("anomaly", f"step {record.step} broke verify: {values}{skipped}", record.step))
            told = replace(told, step=record.step, stepped=now, late=False, anomalies=broken)
        elif isinstance(record, Rollout):
            if record.engines_lost > told.lost:
                text = f"{record.engines_lost - told.lost} engine(s) lost, {record.engines_serving} serve; the controller's log says why"
                alerts.append(Alert("engine_lost", text, told.step))
            if record.workers_lost > told.workers:
                text = f"{record.workers_lost - told.workers} rollout worker(s) lost; the controller's log says why"
                alerts.append(Alert("worker_lost", text, told.step))
            told = replace(told, lost=record.engines_lost, workers=record.workers_lost)
    since = 0.0 if told.stepped is None else now - told.stepped
    if not told.late and since > NO_STEP_S:
        told = replace(told, late=True)
        alerts.append(Alert("no_step", f"no step for {since:.0f} s, after step {told.step}", told.step))
    return told, alerts


class Alarm:
    """Passes the alerts of one run to a command from a thread, so that a slow command delays nothing; a failure is reported once.

    Args:
        command: program and arguments; None: alerts go nowhere.
        run: name of the run.
        say: called, from another thread, with the first failure.
    """

    def __init__(self, command: Sequence[str] | None, run: str, say: Callable[[str], None]) -> None:
        self._command, self._run, self._say = command, run, say
        self._sender, self._sent = ThreadPoolExecutor(1, "alerts"), list[Future[None]]()
        self._failed = False

    def send(self, alert: Alert) -> None:
        """Send an alert; returns at once."""
        if self._command is not None:
            body = {"run": self._run, "event": alert.event, "text": alert.text, "step": alert.step, "time": time.time()}
            self._sent.append(self._sender.submit(self._call, self._command, json.dumps(body).encode()))

    def close(self) -> None:
        """Wait for unsent alerts, for at most twice the limit of one: the alert in progress, then the last one."""
        wait(self._sent, 2 * _TIMEOUT_S)
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _call(self, command: Sequence[str], body: bytes) -> None:
        try:
            done = subprocess.run(command, input=body, capture_output=True, timeout=_TIMEOUT_S, check=False, start_new_session=True)
            why = f"status {done.returncode}: {done.stderr[-300:].decode(errors='replace').strip()}" if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        if why and not self._failed:
            self._failed = True
            self._say(f"an alert was not sent; later failures are not reported: watch.alerts.command: {why}")
