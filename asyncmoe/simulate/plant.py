"""The plant of a simulation, described in YAML: sizes and speeds of a cluster, and the policy of the simulated run.

The loader of `asyncmoe.config` reads it, so a wrong key or value is refused as in the configuration of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import exp
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from asyncmoe.config.loading import load_as
from asyncmoe.errors import ConfigError
from asyncmoe.plan.speeds import Measured
from asyncmoe.queue.admission import Admission
from asyncmoe.simulate import workload as workloads

Mode = Literal["sync", "one_step_off", "async"]
MODES: tuple[Mode, ...] = get_args(Mode)
Spread = Annotated[float, Field(ge=0, le=5), FINITE, NUMBER]


class PlantEngines(Section):
    """The GPUs that generate. A decoding step with B requests takes step_s * (1 + B / step_batch) seconds and gives each of them a token.

    Measure an engine's step at two batch sizes, with contexts of the usual length, and solve for `step_s` and `step_batch`. The simulation
    does not model memory: set `max_running` to the number of requests that fit.
    """

    count: Annotated[int, Field(gt=0, le=1_000_000), NUMBER] = 48
    """Number of SGLang servers."""
    gpus: Positive = 1
    """GPUs of one engine."""
    max_running: Annotated[int, Field(gt=0, le=65_536), NUMBER] = 64
    """Requests an engine decodes at once; further requests wait. A larger batch makes steps slower and tokens cheaper."""
    step_s: PositiveFloat = 0.008
    """Seconds of a decoding step with an empty batch: the time to read the weights."""
    step_batch: PositiveFloat = 128.0
    """Batch size at which a decoding step takes twice as long as an empty one."""
    prefill_s: NonNegativeFloat = 0.0
    """Seconds to prefill the prompts that arrived since the last step; the engine's other requests wait meanwhile."""


class PlantTrainer(Section):
    """The GPUs that train."""

    gpus: Positive = 16
    """GPUs of the trainer."""
    least_gpus: Positive = 1
    """Fewest GPUs on which the trainer fits, by `asyncmoe plan`; --sweep tries multiples of it."""
    step_s: PositiveFloat = 60.0
    """Seconds of a training step on these GPUs. --sweep assumes that it is inversely proportional to their number."""


class PlantSync(Section):
    """The weight update after each training step."""

    seconds: NonNegativeFloat = 0.0
    """Seconds of an update during which engines generate with the previous version."""
    pause_s: NonNegativeFloat = 0.0
    """Seconds of the pause that ends an update, in which engines swap the weights."""


class PlantScoring(Section):
    """The scoring of responses, which no engine waits for."""

    seconds: NonNegativeFloat = 0.0
    """Median seconds to score a response."""
    sigma: Spread = 0.0
    """Standard deviation of the logarithm of the scoring time; 0: always the median."""
    concurrency: Positive | None = None
    """Responses scored at once; null: no limit."""


class Plant(Section):
    """The cluster to simulate, and the run on it."""

    workload: str = "lognormal"
    """Distribution of response lengths: lognormal, fixed, math or search, with keys, e.g. lognormal:median=4096,sigma=1,cap=32768,icc=0.3
    (icc: how alike the responses of a group are); or the directory of a run, from whose recorded groups lengths are drawn."""
    groups_per_step: Positive = 384
    """Prompts per training step. The batch is groups_per_step * group_size responses."""
    group_size: Positive = 8
    """Responses to each prompt."""
    max_staleness: NonNegative = 4
    """Versions a trained token may be behind the trainer, in mode async. Raise it until engines and trainer no longer wait for each other;
    older tokens are worse to learn from. --sweep tries several."""
    max_concurrent: Positive | None = None
    """Requests in flight over all engines, as `rollout.max_concurrent`; at most, and if null, engines.count * engines.max_running."""
    steps: Positive = 40
    """Training steps to simulate; speeds exclude the first 2 * (max_staleness + 1) steps, or the first half if that is fewer."""
    seed: NonNegative = 0
    """Seed of every random draw; the same seed gives the same result."""
    engines: PlantEngines = PlantEngines()
    trainer: PlantTrainer = PlantTrainer()
    sync: PlantSync = PlantSync()
    scoring: PlantScoring = PlantScoring()

    @field_validator("workload")
    @classmethod
    def _known(cls, text: str) -> str:
        try:
            workloads.spec(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    @property
    def batch(self) -> int:
        """Trajectories in a training step."""
        return self.groups_per_step * self.group_size

    @property
    def engine_gpus(self) -> int:
        """GPUs that generate."""
        return self.engines.count * self.engines.gpus

    @property
    def gpus(self) -> int:
        """GPUs of both pools in total."""
        return self.engine_gpus + self.trainer.gpus

    def step_s(self, requests: int) -> float:
        """Return the seconds of an engine's step with this many requests."""
        return self.engines.step_s * (1 + requests / self.engines.step_batch)

    @property
    def full_rate(self) -> float:
        """Tokens per second of all engines with every slot occupied and nothing to prefill."""
        slots = self.engines.max_running
        return self.engines.count * slots / self.step_s(slots)

    def admission(self, mode: Mode) -> Admission:
        """Return the live system's admission policy.

        Mode async uses the capacity law with `max_staleness`. sync uses the bound 0: a batch is generated, trained and published before the
        next starts. one_step_off uses the bound 1, and a batch starts only when the previous one is complete.
        """
        return Admission(self.batch, {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[mode])

    def at_speeds(self, measured: Measured) -> Plant:
        """Return the plant with the step times that follow from measured speeds; without a workload, also with the measured lengths.

        One measurement gives one batch's decoding step, so `engines.step_batch`, by which steps grow with the batch, is kept.
        """
        engines, median = measured.engines, measured.lengths.response / exp(0.5)
        workload = self.workload if "workload" in self.model_fields_set else f"lognormal:median={median:.0f}"
        groups = islice(workloads.parse(workload).groups(self.group_size, self.seed), 1024)
        tokens = self.batch * (measured.lengths.prompt + mean(sum(turns) for group in groups for turns, _ in group))
        step_s = engines.running / (engines.each * self.engines.gpus) / (1 + engines.running / self.engines.step_batch)
        train_s = tokens / (measured.trainer.each * self.trainer.gpus)
        return self.having({"workload": workload, "engines.step_s": step_s, "trainer.step_s": train_s})

    def having(self, changes: Mapping[str, Any]) -> Plant:
        """Return a plant with other values at some keys, e.g. {"engines.count": 8}. Raises pydantic's ValidationError."""
        values = self.model_dump()
        for key, value in changes.items():
            *section, name = key.split(".")
            (values[section[0]] if section else values)[name] = value
        return Plant.model_validate(values)


def read_plant(arguments: Sequence[str]) -> Plant:
    """Read the plant from `[PLANT] [KEY=VALUE]...`; without a file, every key has its default.

    Raises:
        ConfigError: a file, key or value that is refused; see `asyncmoe.config.loading.load_as`.
    """
    file = Path(arguments[0]) if arguments and "=" not in arguments[0] else None
    return load_as(Plant, file, arguments if file is None else arguments[1:])
