"""What a run shows and exports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncmoe.config.fields import Positive, Section, Switch


class TelemetrySection(Section):
    """Live view and export of metrics. Records, logs and the report are always written."""

    live: Annotated[Literal["auto", "on", "off"], Switch] = Field("auto", description="Live view of the run; auto: only on a terminal.")
    tensorboard: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto", description="Also write TensorBoard files, to run.dir/tensorboard; auto: if the package tensorboard is installed."
    )
    prometheus_port: Annotated[Positive, Field(le=65535)] | None = Field(
        None, description="Loopback port that serves the run's gauges to Prometheus; null: no port is opened."
    )
