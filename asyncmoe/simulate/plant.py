"""The plant of a simulation, as YAML describes it: sizes and speeds of a cluster, and the policy of the run on it.

The loader of `asyncmoe.config` reads it, so a wrong key or value is refused as in the configuration of a run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, Positive, Section
from asyncmoe.errors import ConfigError
from asyncmoe.queue.admission import Admission
from asyncmoe.simulate import workload as workloads
from asyncmoe.simulate.contexts import ContextCosts
from asyncmoe.simulate.decoding import StepTime
from asyncmoe.simulate.plant_parts import PlantEngines, PlantFailures, PlantScaling, PlantScoring, PlantSync, PlantTrainer, PlantWorkers

Mode = Literal["sync", "one_step_off", "async"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Plant(Section):
    """The cluster to simulate, and the run on it."""

    workload: str = Field(
        "lognormal",
        description="Distribution of response lengths: lognormal, gamma, fixed, math, kimi-k2, moonlight, qwen2-vl, search or tools, with "
        "keys, e.g. lognormal:median=4096,sigma=1,cap=32768,icc=0.3 (icc: how alike the responses of a group are); a file with one length "
        "in tokens per line; or the directory of a run, whose recorded groups are drawn from.",
    )
    groups_per_step: Positive = Field(384, description="Prompts per training step. The batch is groups_per_step * group_size responses.")
    group_size: Positive = Field(8, description="Responses to each prompt.")
    prompt_tokens: NonNegative = Field(0, description="Tokens of a prompt.")
    tool_tokens: NonNegative = Field(0, description="Tokens of a tool's answer, which the next turn's context has.")
    max_staleness: NonNegative = Field(
        4,
        description="Versions a trained token may be behind the trainer, in mode async. Raise it until engines and trainer no longer wait "
        "for each other; older tokens are worse to learn from. --sweep tries several.",
    )
    queue_capacity: Positive | None = Field(
        None, description="Trajectories the queue holds before complete groups wait outside; null: (max_staleness + 1) batches."
    )
    max_concurrent: Positive | None = Field(
        None,
        description="Requests in flight over all engines, as `rollout.max_concurrent`; those that find no slot wait at their engine. "
        "null: as many as the engines have slots.",
    )
    tail_batching: Annotated[float, Field(ge=1, le=4), FINITE, NUMBER] = Field(
        1.0,
        description="Modes sync and one_step_off: prompts that a round starts, as a multiple of groups_per_step. When groups_per_step are "
        "complete, the others are cancelled; once they are as many, they have a round of their own (RollPacker, arXiv 2509.21009). 1: off.",
    )
    steps: Positive = Field(40, description="Training steps to simulate; speeds leave out the first 2 * (max_staleness + 1), at most half.")
    seed: NonNegative = Field(0, description="Seed of every random draw; the same seed gives the same result.")
    engines: PlantEngines = PlantEngines()
    trainer: PlantTrainer = PlantTrainer()
    sync: PlantSync = PlantSync()
    scaling: PlantScaling = PlantScaling()
    workers: PlantWorkers = PlantWorkers()
    scoring: PlantScoring = PlantScoring()
    failures: PlantFailures = PlantFailures()

    @field_validator("workload")
    @classmethod
    def _known(cls, text: str) -> str:
        try:
            workloads.check(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    @model_validator(mode="after")
    def _check(self) -> Plant:
        if self.queue_capacity is not None and self.queue_capacity < self.batch:
            raise ValueError(
                f"queue_capacity: got {self.queue_capacity}, expected at least a step's batch of groups_per_step * group_size = "
                f"{self.batch}; leave it out or raise it"
            )
        if self.scaling.first is not None and self.scaling.first > self.engines.count:
            raise ValueError(
                f"scaling.first: got {self.scaling.first}, expected at most engines.count = {self.engines.count}; lower it, or raise that"
            )
        return self

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
        """GPUs of both pools together."""
        return self.engine_gpus + self.trainer.gpus

    @property
    def step(self) -> StepTime:
        """Step time of an engine."""
        return StepTime(self.engines.step_s, self.engines.step_batch)

    @property
    def full_rate(self) -> float:
        """Tokens per second of all engines with every slot taken, nothing to prefill and contexts that cost nothing."""
        slow, slots = self.slow_engines, self.engines.max_running
        return (self.engines.count - len(slow) + len(slow) / self.engines.slow_factor) * slots / self.step(slots)

    @property
    def slow_engines(self) -> dict[int, float]:
        """The factor of each slow engine, by its number."""
        count = round(self.engines.count * self.engines.slow_share) if self.engines.slow_factor > 1 else 0
        return dict.fromkeys(random.Random(self.seed).sample(range(self.engines.count), count), self.engines.slow_factor)

    @property
    def context_costs(self) -> ContextCosts | None:
        """What contexts cost an engine; None: nothing."""
        e = self.engines
        costs = ContextCosts(e.context_s, e.prefill_token_s, e.prefill_chunk or math.inf, e.kv_tokens or math.inf)
        return None if costs == ContextCosts() else costs

    def train_s(self, lengths: Iterable[int]) -> float:
        """Return the seconds of a training step on sequences of these lengths, in tokens."""
        t = self.trainer
        if not t.token_s:
            return t.step_s
        w = t.attention_width
        return t.step_s + t.token_s * sum(s * (s + w) / w if w else s for s in lengths)

    def fetch_s(self, tokens: int) -> float:
        """Return the seconds in which a batch of so many tokens reaches the trainer."""
        t = self.trainer
        return tokens * t.bytes_per_token / t.fetch_bytes_per_s if t.fetch_bytes_per_s else 0.0

    def with_trainer(self, gpus: int) -> dict[str, Any]:
        """Return the changes that give a step of the trainer to `gpus` GPUs: it takes less time in proportion to their number."""
        factor = self.trainer.gpus / gpus
        return {"trainer.step_s": self.trainer.step_s * factor, "trainer.token_s": self.trainer.token_s * factor}

    def admission(self, mode: Mode) -> Admission:
        """Return the live system's admission policy.

        Mode async has the capacity law with `max_staleness`. sync has the bound 0: a batch is generated, trained and published before the
        next starts. one_step_off has the bound 1, and a batch starts only when the previous one is complete.
        """
        return Admission(self.batch, {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[mode])

    def capacity(self, mode: Mode) -> int:
        """Return the number of trajectories the queue holds."""
        return self.queue_capacity or (self.admission(mode).max_staleness + 1) * self.batch

    def having(self, changes: Mapping[str, Any]) -> Plant:
        """Return a plant with other values at some keys, e.g. {"engines.count": 8}. Raises pydantic's ValidationError."""
        values = self.model_dump()
        for key, value in changes.items():
            *section, name = key.split(".")
            (values[section[0]] if section else values)[name] = value
        return Plant.model_validate(values)

    def described(self) -> dict[str, Any]:
        """Return all values for JSON; a plant file may have the same."""
        return self.model_dump(mode="json")
