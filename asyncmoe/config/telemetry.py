"""What a run shows and exports, and what it profiles."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncmoe.config.fields import NUMBER, NonNegative, Positive, Seconds, Section, Switch, refused
from asyncmoe.logs import LogBounds

_MOST_STEPS = 100


class WandbSection(Section):
    """Weights & Biases; needs `pip install 'asyncmoe[wandb]'`. The key comes from WANDB_API_KEY or `wandb login`, never from here."""

    project: str = Field("asyncmoe", min_length=1, description="Project.")
    entity: str | None = Field(None, description="User or team; null: the account's own default.")
    name: str | None = Field(None, description="Name of the run; null: the name of run.dir.")
    group: str | None = Field(None, description="Group of the run.")
    tags: tuple[str, ...] = Field((), description="Tags of the run.")
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline: write to run.dir/loggers/wandb only, and send it later with `wandb sync`. null: WANDB_MODE, else online.",
    )


class MlflowSection(Section):
    """MLflow; needs `pip install 'asyncmoe[mlflow]'`. Credentials come from MLFLOW_TRACKING_USERNAME and the like, never from here."""

    uri: str | None = Field(
        None, description="Tracking server, e.g. http://127.0.0.1:5000 (https with one that is not yours); null: MLFLOW_TRACKING_URI."
    )
    experiment: str = Field("asyncmoe", min_length=1, description="Experiment; made if there is none.")
    name: str | None = Field(None, description="Name of the run; null: the name of run.dir.")
    tags: dict[str, str] = Field({}, description="Tags of the run.")

    @model_validator(mode="after")
    def _check(self) -> MlflowSection:
        if self.uri is not None and "://" not in self.uri:
            raise refused("telemetry.mlflow.uri", self.uri, "an address such as http://127.0.0.1:5000; write its scheme too")
        _refuse_secret("telemetry.mlflow.uri", self.uri or "", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return self


class TrackioSection(Section):
    """Trackio; needs `pip install 'asyncmoe[trackio]'`. Keys come from HF_TOKEN or TRACKIO_WRITE_TOKEN, never from here."""

    project: str = Field("asyncmoe", pattern=r"^[\w\- ]+$", description="Project.")
    name: str | None = Field(None, description="First part of the run's name; null: the name of run.dir. An id follows.")
    group: str | None = Field(None, description="Group of the run.")
    space_id: str | None = Field(
        None, description="Hugging Face Space that shows the run, made private if there is none; null: this machine, see `trackio show`."
    )
    server_url: str | None = Field(None, description="A Trackio server of your own, http://host:port, in place of a Space.")

    @model_validator(mode="after")
    def _check(self) -> TrackioSection:
        if self.space_id is not None and self.server_url is not None:
            raise refused("telemetry.trackio.server_url", "it and telemetry.trackio.space_id", "one of them; leave one out")
        _refuse_secret("telemetry.trackio.server_url", self.server_url or "", "TRACKIO_WRITE_TOKEN")
        return self


class LoggersSection(Section):
    """What all loggers share. Each is a process of its own, which reads the run's records: slow or down, it holds up nothing."""

    samples: bool = Field(
        False,
        description="Also send the trained samples (telemetry.samples), with prompts and responses, as tables to the loggers' servers: "
        "every five minutes and at the end.",
    )
    finish_timeout_s: Seconds = Field(
        30.0, description="Seconds that the end of a run waits for loggers to send the rest; `asyncmoe resend RUN` sends what is missing."
    )


class ProfileSection(Section):
    """Profiles of chosen steps and ranks of the trainer, in run.dir/profile."""

    steps: tuple[Positive, ...] = Field(
        min_length=1, max_length=_MOST_STEPS, description="Steps to profile, counted as in metrics.jsonl: from 1, warm-up included."
    )
    ranks: tuple[NonNegative, ...] = Field((0,), min_length=1, description="Trainer ranks to profile.")
    trace: bool = Field(True, description="Write a trace of PyTorch's profiler, which ui.perfetto.dev and chrome://tracing open.")
    memory: bool = Field(
        False,
        description="Record allocations: in the trace, and on GPUs as a snapshot of the allocator, which pytorch.org/memory_viz opens.",
    )
    shapes: bool = Field(False, description="Record the operators' input shapes in the trace.")
    stack: bool = Field(False, description="Record the operators' Python callers in the trace, which makes it several times as large.")
    max_mb: Positive = Field(2048, description="Largest trace in MB, after compression; a larger one is not kept, and the log says so.")

    @model_validator(mode="after")
    def _check(self) -> ProfileSection:
        if not (self.trace or self.memory):
            raise refused("telemetry.profile.trace", "false", "true because memory is false too; set one of them, or nvtx alone")
        return self


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


class LogsSection(Section):
    """Bounds of logs/*.log. A log that is too large is moved to FILE.1, and that to FILE.2, by the process that started its writer."""

    max_bytes: Annotated[int, Field(ge=1 << 16), NUMBER] = Field(64 << 20, description="Size in bytes at which a log is moved.")
    keep: NonNegative = Field(3, description="Moved parts that are kept of each log; 0: none.")

    @property
    def bounds(self) -> LogBounds:
        return LogBounds(self.max_bytes, self.keep)


class TelemetrySection(Section):
    """Live view, export of metrics, and profiles. Records, logs and the report are always written."""

    live: Annotated[Literal["auto", "on", "off"], Switch] = Field("auto", description="Live view of the run; auto: only on a terminal.")
    tensorboard: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto", description="Also write TensorBoard files, to run.dir/tensorboard; auto: if the package tensorboard is installed."
    )
    prometheus_port: Annotated[int, Field(gt=0, le=65535), NUMBER] | None = Field(
        None, description="Port that serves the run's gauges to Prometheus as /metrics, and /health; null: no port is opened."
    )
    prometheus_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1",
        description="Address that prometheus_port listens on. Requests to another than loopback need the key in run.dir/metrics.key, as "
        "Prometheus sends it with authorization.credentials_file.",
    )
    logs: LogsSection = LogsSection()
    samples: SamplesSection = SamplesSection()
    wandb: WandbSection | None = None
    mlflow: MlflowSection | None = None
    trackio: TrackioSection | None = None
    loggers: LoggersSection = LoggersSection()
    profile: ProfileSection | None = None
    nvtx: bool = Field(
        False, description="Name the parts of every step in NVTX ranges, for `nsys profile`; needs GPUs. False costs nothing."
    )

    @model_validator(mode="after")
    def _check(self) -> TelemetrySection:
        if self.loggers.samples and not self.samples.groups:
            expected = "false because telemetry.samples.groups is 0; raise that, or set it to false"
            raise refused("telemetry.loggers.samples", "true", expected)
        return self


def _refuse_secret(key: str, url: str, variables: str) -> None:
    """Refuse an address with a password or a token: the run's files, and the loggers, would show it."""
    parts = urlsplit(url)
    if parts.password or "token" in parts.query.lower():
        raise refused(key, "an address with a secret in it", f"one without; put it into {variables}")
