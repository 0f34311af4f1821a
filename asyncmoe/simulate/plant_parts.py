"""The parts of a plant: engines, trainer, weight sync, rollout workers, scoring and failures, a section each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import FINITE, NUMBER, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from asyncmoe.config.rollout import Balance

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
        description="Share that an engine's cache has of a prefix that it has had: of the prompt, after the first response of a group "
        "there; of the conversation so far, for a turn at the engine of the turn before.",
    )
    balance: Balance = Field("least_loaded", description="Which engine gets a request, as `rollout.balance`.")
    affinity_slack: NonNegative = Field(
        8, description="prefix_affine: requests a prefix's engine may have above the least loaded one, as `rollout.affinity_slack`."
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


class PlantScaling(Section):
    """Engines that come and go with the queue (`asyncmoe/engines/autoscale.py`): off by default. A run advises so with these bounds
    of the queue and of patience, as `engines_advised`."""

    first: Positive | None = Field(None, description="Engines that serve at first; engines.count is the most. null: all serve, always.")
    least: Positive = Field(1, description="Engines that serve at least.")
    low: NonNegativeFloat = Field(0.75, description="Batches in the queue below which an engine is missing, if the engines are full.")
    high: PositiveFloat = Field(1.5, description="Batches in the queue from which on an engine is too many.")
    patience_s: PositiveFloat = Field(60.0, description="Seconds for which a reason must hold.")
    start_s: NonNegativeFloat = Field(60.0, description="Seconds until an engine that is started serves.")

    @model_validator(mode="after")
    def _check(self) -> PlantScaling:
        if self.low >= self.high:
            raise ValueError(f"scaling.low: got {self.low:g}, expected less than scaling.high = {self.high:g}; lower it")
        if self.first is not None and self.first < self.least:
            raise ValueError(f"scaling.first: got {self.first}, expected at least scaling.least = {self.least}; raise it")
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
