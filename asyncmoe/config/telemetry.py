"""Output, export and profiles of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncmoe.config.fields import NUMBER, NonNegative, Positive, Section, Switch

_MOST_STEPS = 100


class WandbSection(Section):
    """Weights & Biases; needs `pip install 'asyncmoe[wandb]'`. The API key comes from WANDB_API_KEY or `wandb login`, never from this file;
    W&B's own variables set everything else, such as WANDB_MODE=offline."""

    project: str = Field("asyncmoe", min_length=1)
    """Project. The run has the name of run.dir."""


class MlflowSection(Section):
    """MLflow; needs `pip install 'asyncmoe[mlflow]'`. MLFLOW_TRACKING_URI names the tracking server, for example http://127.0.0.1:5000
    (https if the server is not your own); credentials come from MLFLOW_TRACKING_USERNAME and the like."""

    experiment: str = Field("asyncmoe", min_length=1)
    """Experiment, created if it does not exist. The run has the name of run.dir."""


class TrackioSection(Section):
    """Trackio; needs `pip install 'asyncmoe[trackio]'`. API keys come from HF_TOKEN or TRACKIO_WRITE_TOKEN, never from this file."""

    project: str = Field("asyncmoe", pattern=r"^[\w\- ]+$")
    """Project. It is kept on this machine (see `trackio show`), in the Hugging Face Space that the variable TRACKIO_SPACE_ID names (created
    as private if it does not exist), or on the server of TRACKIO_SERVER_URL."""


class ProfileSection(Section):
    """Profiles of chosen steps and ranks of the trainer, in run.dir/profile: traces, which ui.perfetto.dev and chrome://tracing open."""

    steps: tuple[Positive, ...] = Field(min_length=1, max_length=_MOST_STEPS)
    """Steps to profile, counted as in metrics.jsonl: from 1, warm-up included."""
    ranks: tuple[NonNegative, ...] = Field((0,), min_length=1)
    """Trainer ranks to profile."""
    memory: bool = False
    """Record allocations: in the trace, and on GPUs as a snapshot of the allocator, which pytorch.org/memory_viz opens."""


class SamplesSection(Section):
    """Trajectories kept in run.dir/samples for `asyncmoe show` (docs/guides/samples.md). Only its owner can read the folder, which holds at
    most 256 MiB. The groups are drawn at random with run.seed. At most 8,192 tokens of a prompt and 8,192 of the text after it are kept;
    the middle of a longer text is left out."""

    groups: NonNegative = 2
    """Groups to keep of every rollout.groups_per_step groups, rejected and dropped ones included; 0: none."""


class TelemetrySection(Section):
    """Export of metrics, and profiles. Records, logs and the report are always written."""

    tensorboard: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Also write TensorBoard files, to run.dir/tensorboard; auto: if the package tensorboard is installed."""
    prometheus_port: Annotated[int, Field(gt=0, le=65535), NUMBER] | None = None
    """Port of 127.0.0.1 that serves the run's gauges to Prometheus as /metrics; null: no port is opened."""
    samples: SamplesSection = SamplesSection()
    wandb: WandbSection | None = None
    mlflow: MlflowSection | None = None
    trackio: TrackioSection | None = None
    profile: ProfileSection | None = None
