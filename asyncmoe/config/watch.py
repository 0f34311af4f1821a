"""Watching a run: heartbeats, stacks of what hangs, and alerts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, Seconds, Section, refused


class AlertsSection(Section):
    """Alerts about a run that needs attention. The process that supervises the run sends them, without delaying the run."""

    command: tuple[str, ...] | None = Field(None, min_length=1)
    """Command to run for each alert, with run, event, text, step and time as JSON on standard input; null: none."""


class WatchSection(Section):
    """Every process of a run writes heartbeats to run.dir/heartbeats while its work makes progress."""

    beat_s: Annotated[float, Field(ge=0.1, le=60), FINITE, NUMBER] = 5.0
    """Minimum seconds between heartbeats of a process."""
    stacks_after_s: Seconds = 120.0
    """If a process has written no heartbeat for this many seconds, the stacks of every process of the run on the supervisor's host are
    written to run.dir/logs, once for each silence. The run goes on: a long step or checkpoint may be the cause."""
    end_after_s: Seconds | None = 1800.0
    """Seconds without a heartbeat after which the controller or a trainer rank counts as lost; null: never."""
    alerts: AlertsSection = AlertsSection()

    @model_validator(mode="after")
    def _check(self) -> WatchSection:
        if self.stacks_after_s < 3 * self.beat_s:
            raise refused("watch.stacks_after_s", f"{self.stacks_after_s:g}", f"at least 3 * watch.beat_s = {3 * self.beat_s:g}; raise it")
        if self.end_after_s is not None and self.end_after_s < self.stacks_after_s:
            expected = f"at least watch.stacks_after_s = {self.stacks_after_s:g}; raise it"
            raise refused("watch.end_after_s", f"{self.end_after_s:g}", expected)
        return self
