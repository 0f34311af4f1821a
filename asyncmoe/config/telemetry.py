"""What a run shows and exports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncmoe.config.fields import NonNegative, Positive, Section, Switch


class SamplesSection(Section):
    """Trajectories that are kept to be read with `asyncmoe show` (docs/guides/samples.md), in run.dir/samples, which only its owner can
    read. The groups are drawn by run.seed, so a group that is sampled again is kept again."""

    groups: NonNegative = Field(
        2, description="Groups kept of each rollout.groups_per_step prompts, rejected and dropped groups included; 0: none."
    )
    max_tokens: Positive = Field(
        8192, description="Tokens kept of a prompt, and of what follows it in a trajectory; of more, the middle is left out."
    )
    max_bytes: Positive = Field(
        1 << 28, description="Bound on the size of the folder in bytes. When it is reached, the log says so and no more groups are kept."
    )


class TelemetrySection(Section):
    """Live view and export of metrics. Records, logs and the report are always written."""

    live: Annotated[Literal["auto", "on", "off"], Switch] = Field("auto", description="Live view of the run; auto: only on a terminal.")
    tensorboard: bool = Field(True, description="Also write TensorBoard files, to run.dir/tensorboard.")
    prometheus_port: Annotated[Positive, Field(le=65535)] | None = Field(
        None, description="Loopback port that serves the run's gauges to Prometheus; null: no port is opened."
    )
    samples: SamplesSection = SamplesSection()
