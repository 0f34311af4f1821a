"""Parameters of a simulation: sizes and speeds of a run. Validated on construction, so that a simulation cannot fail on its input."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from asyncmoe.errors import ConfigError
from asyncmoe.queue.admission import Admission
from asyncmoe.simulate.fleet import StepTime

Mode = Literal["sync", "one_step_off", "async"]
MODES: tuple[Mode, ...] = get_args(Mode)
Landing = Literal["pause", "drain"]
LANDINGS: tuple[Landing, ...] = get_args(Landing)


@dataclass(frozen=True)
class Hazards:
    """Failures and random variation.

    Attributes:
        score_failure: share of responses that cannot be scored; their groups are rejected.
        engine_mtbf_s: mean seconds between two failures of one engine; 0: no failures.
        engine_restart_s: seconds until a failed engine is back.
        trainer_failure: share of training steps in which the trainer dies; its lease returns to the queue.
        trainer_restart_s: seconds until a failed trainer is back.
        jitter: standard deviation of the logarithm of every training time, sync time and pause.
    """

    score_failure: float = 0.0
    engine_mtbf_s: float = 0.0
    engine_restart_s: float = 300.0
    trainer_failure: float = 0.0
    trainer_restart_s: float = 300.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Plant:
    """Resources, speeds and policy.

    Attributes:
        engines, gpus_per_engine: size of the generating pool.
        concurrency: requests an engine decodes at once.
        step_s, step_batch: t0 and b0 of `StepTime`.
        prefill_s: seconds to prefill the prompts that arrived since the last step; the engine's other requests pause meanwhile.
        trainer_gpus: size of the training pool.
        train_s: seconds of a training step on these GPUs.
        sync_s: seconds after a training step during which engines still generate with the previous version.
        pause_s: seconds after that during which the engines pause, before they serve the new version.
        landing: "pause": requests pause with the engines and continue with the new version. "drain": before a version lands, new requests
            wait until the running ones finish.
        score_s, score_sigma: median seconds to score a response, and standard deviation of their logarithm.
        score_concurrency: responses scored at once; 0: no limit.
        mode: "async": the capacity law with `eta`. "sync": eta 0, so a batch is generated, trained and published before the next starts.
            "one_step_off": eta 1, and a batch starts only when the previous one is complete.
        queue_capacity: trajectories the queue holds before a group waits; 0: (eta + 1) batches.
        steps: training steps to simulate.
    """

    engines: int = 48
    gpus_per_engine: int = 1
    concurrency: int = 64
    step_s: float = 0.008
    step_batch: float = 128.0
    prefill_s: float = 0.0
    trainer_gpus: int = 16
    groups: int = 384
    group_size: int = 8
    train_s: float = 60.0
    sync_s: float = 0.0
    pause_s: float = 0.0
    landing: Landing = "pause"
    score_s: float = 0.0
    score_sigma: float = 0.0
    score_concurrency: int = 0
    mode: Mode = "async"
    eta: int = 4
    queue_capacity: int = 0
    steps: int = 30
    seed: int = 0
    hazards: Hazards = Hazards()

    def __post_init__(self) -> None:
        for owner in (self, self.hazards):
            for field in fields(owner):
                _check(field.name, getattr(owner, field.name))
        if self.queue_capacity and self.queue_capacity < self.batch:
            raise ConfigError(
                "--queue-capacity", got=self.queue_capacity, expected=f"at least one step's batch of {self.batch} trajectories"
            )

    @property
    def batch(self) -> int:
        """Trajectories in a training step."""
        return self.groups * self.group_size

    @property
    def gpus(self) -> int:
        """GPUs of both pools together."""
        return self.engines * self.gpus_per_engine + self.trainer_gpus

    @property
    def step(self) -> StepTime:
        """Step time of an engine."""
        return StepTime(self.step_s, self.step_batch)

    @property
    def full_rate(self) -> float:
        """Tokens per second of all engines with every slot taken and nothing to prefill."""
        return self.engines * self.concurrency / self.step(self.concurrency)

    @property
    def admission(self) -> Admission:
        """The live system's admission policy, with the eta of the mode."""
        return Admission(self.batch, {"sync": 0, "one_step_off": 1, "async": self.eta}[self.mode])

    @property
    def capacity(self) -> int:
        """Trajectories the queue holds."""
        return self.queue_capacity or (self.admission.eta + 1) * self.batch

    def described(self) -> dict[str, Any]:
        """Return all parameters as plain values for JSON."""
        return asdict(self)


_AT_LEAST_1 = {"engines", "gpus_per_engine", "concurrency", "trainer_gpus", "groups", "group_size", "steps"}
_POSITIVE = {"step_s", "step_batch", "train_s"}
_SHARES = {"score_failure", "trainer_failure"}
_SPREADS = {"score_sigma", "jitter"}
_MOST = {"engines": 1_000_000, "concurrency": 65_536}


def _check(name: str, value: Any) -> None:
    option = "--" + name.replace("_", "-")
    if not isinstance(value, int | float):
        return
    if name in _AT_LEAST_1:
        most = _MOST.get(name, 1 << 30)
        if not 1 <= value <= most:
            raise ConfigError(option, got=value, expected=f"a whole number from 1 to {most}")
    elif name in _POSITIVE:
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(option, got=value, expected="a positive number")
    elif name in _SHARES:
        if not 0 <= value <= 0.9:
            raise ConfigError(option, got=value, expected="a share from 0 to 0.9")
    elif name in _SPREADS:
        if not 0 <= value <= 5:
            raise ConfigError(option, got=value, expected="a number from 0 to 5")
    elif not (math.isfinite(value) and value >= 0):
        raise ConfigError(option, got=value, expected="0 or more")
