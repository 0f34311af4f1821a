"""What a run shows and exports, and what it profiles."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import NUMBER, NonNegative, Positive, Section, Switch, refused

_MOST_STEPS = 100


class WandbSection(Section):
    """Weights & Biases; needs `pip install 'asyncmoe[wandb]'`. The key comes from WANDB_API_KEY or `wandb login`, never from here; what
    else W&B can do, such as WANDB_MODE=offline, is in its own variables."""

    project: str = Field("asyncmoe", min_length=1, description="Project. The run has the name of run.dir.")


class MlflowSection(Section):
    """MLflow; needs `pip install 'asyncmoe[mlflow]'`. Credentials come from MLFLOW_TRACKING_USERNAME and the like, never from here."""

    uri: str | None = Field(
        None, description="Tracking server, e.g. http://127.0.0.1:5000 (https with one that is not yours); null: MLFLOW_TRACKING_URI."
    )
    experiment: str = Field("asyncmoe", min_length=1, description="Experiment, made if there is none. The run has the name of run.dir.")

    @model_validator(mode="after")
    def _check(self) -> MlflowSection:
        if self.uri is not None and "://" not in self.uri:
            raise refused("telemetry.mlflow.uri", self.uri, "an address such as http://127.0.0.1:5000; write its scheme too")
        _refuse_secret("telemetry.mlflow.uri", self.uri or "", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return self


class TrackioSection(Section):
    """Trackio; needs `pip install 'asyncmoe[trackio]'`. Keys come from HF_TOKEN or TRACKIO_WRITE_TOKEN, never from here."""

    project: str = Field(
        "asyncmoe",
        pattern=r"^[\w\- ]+$",
        description="Project. It is on this machine, see `trackio show`; in the Hugging Face Space that the variable TRACKIO_SPACE_ID "
        "names, made private if there is none; or on the server of TRACKIO_SERVER_URL.",
    )


class ProfileSection(Section):
    """Profiles of chosen steps and ranks of the trainer, in run.dir/profile: traces, which ui.perfetto.dev and chrome://tracing open."""

    steps: tuple[Positive, ...] = Field(
        min_length=1, max_length=_MOST_STEPS, description="Steps to profile, counted as in metrics.jsonl: from 1, warm-up included."
    )
    ranks: tuple[NonNegative, ...] = Field((0,), min_length=1, description="Trainer ranks to profile.")
    memory: bool = Field(
        False,
        description="Record allocations: in the trace, and on GPUs as a snapshot of the allocator, which pytorch.org/memory_viz opens.",
    )


class SamplesSection(Section):
    """Trajectories that are kept to be read with `asyncmoe show` (docs/guides/samples.md), in run.dir/samples, which only its owner can
    read and which has 256 MiB at most. The groups are drawn by run.seed, so a group that is sampled again is kept again. Of a prompt, and
    of what follows it, 8,192 tokens are kept; of more, the middle is left out."""

    groups: NonNegative = Field(
        2, description="Groups kept of each rollout.groups_per_step prompts, rejected and dropped groups included; 0: none."
    )


class TelemetrySection(Section):
    """Export of metrics, and profiles. Records, logs and the report are always written."""

    tensorboard: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto", description="Also write TensorBoard files, to run.dir/tensorboard; auto: if the package tensorboard is installed."
    )
    prometheus_port: Annotated[int, Field(gt=0, le=65535), NUMBER] | None = Field(
        None, description="Port of 127.0.0.1 that serves the run's gauges to Prometheus as /metrics; null: no port is opened."
    )
    samples: SamplesSection = SamplesSection()
    wandb: WandbSection | None = None
    mlflow: MlflowSection | None = None
    trackio: TrackioSection | None = None
    profile: ProfileSection | None = None


def _refuse_secret(key: str, url: str, variables: str) -> None:
    """Refuse an address with a password or a token: the run's files, and the loggers, would show it."""
    parts = urlsplit(url)
    if parts.password or "token" in parts.query.lower():
        raise refused(key, "an address with a secret in it", f"one without; put it into {variables}")
