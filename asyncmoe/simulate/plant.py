"""The plant of a simulation, as YAML describes it: sizes and speeds of a cluster, and the policy of the run on it.

The loader of `asyncmoe.config` reads it, so a wrong key or value is refused as in the configuration of a run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from asyncmoe.errors import ConfigError
from asyncmoe.queue.admission import Admission
from asyncmoe.simulate import workload as workloads
from asyncmoe.simulate.contexts import ContextCosts
from asyncmoe.simulate.decoding import StepTime

Mode = Literal["sync", "one_step_off", "async"]
MODES: tuple[Mode, ...] = get_args(Mode)
Landing = Literal["pause", "drain"]
FailureShare = Annotated[float, Field(ge=0, le=0.9), FINITE, NUMBER]
Spread = Annotated[float, Field(ge=0, le=5), FINITE, NUMBER]
PartOrAll = Annotated[float, Field(ge=0, le=1), FINITE, NUMBER]


class PlantEngines(Section):
    """The GPUs that generate. A decoding step with B requests takes step_s * (1 + B / step_batch) seconds and gives each of them a token.

    Measure an engine's step at two batch sizes and solve for `step_s` and `step_batch`. By default contexts cost nothing: an engine has
    room for any, and its steps do not grow with them.
    """

    count: Annotated[int, Field(gt=0, le=1_000_000), NUMBER] = Field(48, description="Number of SGLang servers.")
    gpus: Positive = Field(1, description="GPUs of one engine.")
    max_running: Annotated[int, Field(gt=0, le=65_536), NUMBER] = Field(
        64, description="Requests an engine decodes at once; further requests wait. A larger batch makes steps slower and tokens cheaper."
    )
    step_s: PositiveFloat = Field(0.008, description="Seconds of a decoding step with an empty batch: the time to read the weights.")
    step_batch: PositiveFloat = Field(128.0, description="Batch size at which a decoding step takes twice as long as an empty one.")
    order: Literal["arrival", "fifo", "longest_first", "probes_first"] = Field(
        "arrival",
        description="Which request gets a free slot: the first that came, or the order of that name of the live pool (`rollout.order`), in "
        "which continued episodes precede new ones.",
    )
    context_s: NonNegativeFloat = Field(
        0.0,
        description="Seconds a decoding step takes longer for each token of the running requests' contexts: the time to read its keys and "
        "values. Measure a step at two lengths of context.",
    )
    prefill_s: NonNegativeFloat = Field(
        0.0, description="Seconds to prefill the prompts that arrived since the last step; the engine's other requests wait meanwhile."
    )
    prefill_token_s: NonNegativeFloat = Field(0.0, description="Seconds more for each token of a prefill that is not in the prefix cache.")
    prefill_chunk: Positive | None = Field(
        None, description="Tokens of one pass of a prefill; a longer one takes `prefill_s` for each pass. null: all in one pass."
    )
    prefix_hits: PartOrAll = Field(
        0.0,
        description="Share of a known prefix that the engine's cache has: of the prompt, for all but the first response of a group; of the "
        "conversation so far, for later turns.",
    )
    kv_tokens: Positive | None = Field(
        None,
        description="Tokens whose keys and values an engine has room for. When the contexts of running requests reach it, the newest is "
        "preempted, waits, and is prefilled again. Responses to one prompt are not taken to share its room. null: no limit.",
    )
    slow_share: PartOrAll = Field(0.0, description="Share of the engines that are slow.")
    slow_factor: Annotated[float, Field(ge=1, le=1000), FINITE, NUMBER] = Field(
        1.0, description="How many times as long a step or prefill of a slow engine takes."
    )
    per_node: Positive = Field(1, description="Engines on one node; they fail together, see `failures.node_mtbf_s`.")


class PlantTrainer(Section):
    """The GPUs that train."""

    gpus: Positive = Field(16, description="GPUs of the trainer.")
    step_s: PositiveFloat = Field(
        60.0, description="Seconds of a training step on these GPUs. --sweep takes it to fall in proportion to their number."
    )
    token_s: NonNegativeFloat = Field(
        0.0,
        description="Seconds more for each token of the batch, prompts and tools' answers included; `step_s` is then what does not grow.",
    )
    attention_width: Positive | None = Field(
        None,
        description="Tokens w of a sequence at which attention costs as much as all else: one of s tokens takes token_s * s * (s + w) / w "
        "seconds. null: attention costs nothing.",
    )
    bytes_per_token: NonNegativeFloat = Field(
        0.0, description="Bytes of a trajectory by token: 349 with the routes of Qwen3-30B-A3B (`shapes.qwen3-30b-a3b.bytes` / 4,096)."
    )
    fetch_bytes_per_s: PositiveFloat | None = Field(
        None,
        description="Bytes a second in which a batch reaches the trainer, before its step; 0.85e9 over one encrypted connection "
        "(docs/measurements.md, `shapes.qwen3-30b-a3b.ways.tcp.GBps`). null: no time.",
    )


class PlantSync(Section):
    """The weight update after each training step."""

    seconds: NonNegativeFloat = Field(0.0, description="Seconds of an update during which engines generate with the previous version.")
    plan: Path | None = Field(
        None, description="Take `seconds` from this file of `asyncmoe plan --json FILE`: the fastest method's seconds over the NIC."
    )
    pause_s: NonNegativeFloat = Field(0.0, description="Seconds after that during which the engines pause, to swap the weights.")
    landing: Landing = Field(
        "pause",
        description="How a version lands. pause: running requests pause and continue with it. drain: no request starts until all running "
        "ones are complete, so every version waits for the longest response.",
    )

    recompute: bool = Field(
        False, description="Contexts of running requests are prefilled again with each version, as with rollout.interruption=retract."
    )

    @model_validator(mode="after")
    def _check(self) -> PlantSync:
        if self.plan is not None and self.seconds:
            raise ValueError(f"sync.plan: got {self.plan}, expected nothing because sync.seconds is {self.seconds:g}; give one of them")
        return self


class PlantWorkers(Section):
    """The rollout processes that receive what engines sample; each serves its responses one after the other."""

    count: Positive = Field(1, description="Rollout workers; groups are dealt to them in turn.")
    tokens_per_s: PositiveFloat | None = Field(
        None, description="Sampled tokens a second that one of them takes in: less with routes. null: no limit."
    )


class PlantScoring(Section):
    """The scoring of responses, which no engine waits for."""

    seconds: NonNegativeFloat = Field(0.0, description="Median seconds to score a response.")
    sigma: Spread = Field(0.0, description="Standard deviation of the logarithm of the scoring time; 0: always the median.")
    concurrency: Positive | None = Field(None, description="Responses scored at once; null: no limit.")


class PlantFailures(Section):
    """Failures and random variation; by default there are none."""

    scoring: FailureShare = Field(0.0, description="Share of responses that cannot be scored; the whole group of each is rejected.")
    engine_mtbf_s: PositiveFloat | None = Field(None, description="Mean seconds between two failures of one engine; null: no failures.")
    node_mtbf_s: PositiveFloat | None = Field(
        None, description="Mean seconds between two failures of one node, which take all its engines; null: no failures."
    )
    engine_restart_s: NonNegativeFloat = Field(300.0, description="Seconds until a failed engine is back.")
    trainer: FailureShare = Field(0.0, description="Share of training steps in which the trainer dies; its batch returns to the queue.")
    trainer_restart_s: NonNegativeFloat = Field(300.0, description="Seconds until a failed trainer is back.")
    jitter: Spread = Field(0.0, description="Standard deviation of the logarithm of every training, sync and pause time.")


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
