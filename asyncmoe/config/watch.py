"""Watching a run: heartbeats, stacks of what hangs, and alerts."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, Seconds, Section, refused

Event = Literal["failed", "silent", "no_step", "engine_lost", "worker_lost", "trainer_lost", "controller_lost", "anomaly"]
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


class AlertsSection(Section):
    """What is told of a run that needs somebody. Alerts are sent by the process that supervises the run, and hold up nothing."""

    on: tuple[Event, ...] = Field(
        ("failed", "silent", "no_step", "engine_lost", "worker_lost", "trainer_lost", "controller_lost", "anomaly"),
        description="Events. failed: the run ended with an error; silent: a process is silent for watch.stacks_after_s; no_step: no step "
        "for no_step_s; engine_lost: an engine died or was fenced; worker_lost: a rollout worker does not answer any more; "
        "trainer_lost: the trainer was lost and is started again (trainer.max_restarts); controller_lost: the same of the controller "
        "(run.controller_restarts); anomaly: a rule of verify.anomalies is broken.",
    )
    webhook: str | None = Field(
        None,
        description="Address that gets each alert as a POST of JSON with run, event, text, step and time; env:NAME reads it from the "
        "environment variable NAME, for addresses that are secrets. null: none.",
    )
    command: tuple[str, ...] | None = Field(
        None, min_length=1, description="Program and arguments that run for each alert and get the same JSON as input; null: none."
    )
    timeout_s: Annotated[float, Field(gt=0, le=300), FINITE, NUMBER] = Field(10.0, description="Seconds that one alert may take.")
    no_step_s: Seconds | None = Field(1800.0, description="Seconds without a step after which no_step is told, once; null: never.")

    @model_validator(mode="after")
    def _check(self) -> AlertsSection:
        if self.webhook is not None and not _VARIABLE.fullmatch(self.webhook):
            parts = urlsplit(self.webhook)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise refused("watch.alerts.webhook", "no http address", "https://host/path, or env:NAME")
            if parts.password or parts.username:
                raise refused("watch.alerts.webhook", "an address with a secret in it", "one without; write env:NAME")
        return self


class WatchSection(Section):
    """Every process of a run writes heartbeats to run.dir/heartbeats while it gets on with its work."""

    beat_s: Annotated[float, Field(ge=0.1, le=60), FINITE, NUMBER] = Field(
        5.0, description="Least seconds between heartbeats of a process."
    )
    stacks_after_s: Seconds = Field(
        120.0,
        description="Seconds of silence of a process after which the stacks of every process of the run on the supervisor's host go to "
        "run.dir/logs, once for each silence. A step, or writing a checkpoint, may take as long.",
    )
    end_after_s: Seconds | None = Field(
        1800.0, description="Seconds of silence of the controller or of a trainer rank after which the run ends; null: never."
    )
    alerts: AlertsSection = AlertsSection()

    @model_validator(mode="after")
    def _check(self) -> WatchSection:
        if self.stacks_after_s < 3 * self.beat_s:
            raise refused("watch.stacks_after_s", f"{self.stacks_after_s:g}", f"at least 3 * watch.beat_s = {3 * self.beat_s:g}; raise it")
        if self.end_after_s is not None and self.end_after_s < self.stacks_after_s:
            expected = f"at least watch.stacks_after_s = {self.stacks_after_s:g}; raise it"
            raise refused("watch.end_after_s", f"{self.end_after_s:g}", expected)
        return self
