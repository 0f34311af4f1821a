"""The records of a run, one JSON object per line. A reader ignores unknown fields and rejects wrong types.

metrics.jsonl           Step, one per optimizer step, and Resume once per resumed start; written by trainer rank 0
rollout.jsonl           Rollout, about one per second; written by the controller
evaluation.jsonl        Evaluation, one per evaluation; written by the controller
spans-trainer.jsonl     Span; written by trainer rank 0
spans-controller.jsonl  Span; written by the controller
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

METRICS = "metrics.jsonl"
ROLLOUT = "rollout.jsonl"
EVALUATION = "evaluation.jsonl"
TRAINER_SPANS = "spans-trainer.jsonl"
CONTROLLER_SPANS = "spans-controller.jsonl"

What = Literal["wait", "train", "sync", "generate", "pause"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the trainer. None: not measured in this step, or not finite. Times are in seconds unless the name says otherwise.

    The step lasted from `time - step_seconds` to `time`: waiting for a batch, training, and weight sync.
    """

    step: int
    """Number of optimizer steps taken, including this step and the warm-up."""
    phase: Literal["warmup", "rl"]
    time: float
    """Unix seconds at the end of the step."""
    step_seconds: float | None = None
    wait_seconds: float | None = None
    train_seconds: float | None = None
    sync_seconds: float | None = None
    """Weight sync of the latest published version: from the end of its optimizer step until every engine served it. None if an earlier
    step already reported it, or no version was published."""
    sync_wait_seconds: float | None = None
    """Time that this step waited for weight sync, during or after training."""
    pause_ms: float | None = None
    """Longest pause of an engine for that version, in milliseconds."""
    version: int | None = None
    loss: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    step_reward_mean: float | None = None
    """Mean reward of the rewarded steps of the batch's responses."""
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None
    """Trained tokens, prompt and response, over all ranks."""
    tokens_per_s: float | None = None
    staleness_max: float | None = None
    """Age of the oldest sampled token, in versions."""
    staleness_mean: float | None = None
    ages: Mapping[int, int] | None = None
    """Number of sampled tokens by age in versions."""
    logprob_diff_max_same_version: float | None = None
    """Largest |trainer - engine| log-probability, in nats, over tokens whose whole prefix was computed under the trainer's version."""
    logprob_diff_mean_same_version: float | None = None
    """Mean |trainer - engine| log-probability over the same tokens, in nats."""
    kl_engine: float | None = None
    """KL(engine || trainer), estimated, in nats per sampled token: the combined effect of staleness and train-inference mismatch."""
    kl_reference: float | None = None
    """KL(trainer || reference policy), estimated, in nats per sampled token."""
    kl_teacher: float | None = None
    """KL(engine || teacher) in nats per sampled token, estimated as mean log-probability difference: unbiased, may be negative."""
    entropy: float | None = None
    """Entropy of the trainer's distribution over the whole vocabulary, in nats per sampled token."""
    clip_fraction: float | None = None
    tis_capped_fraction: float | None = None
    ratio_mean: float | None = None
    """Mean importance ratio pi_trainer / pi_engine over sampled tokens."""
    ratio_quantiles: Mapping[str, float] | None = None
    """Quantiles of the importance ratio, by share."""
    ess: float | None = None
    """Effective sample size of the importance ratios, as a share of the sampled tokens."""
    rejected_fraction: float | None = None
    """Share of the sampled tokens that corrections excluded from the loss."""
    rejected_by_rule: Mapping[str, float] | None = None
    """Share of the sampled tokens that each rule alone would reject."""
    rejected_by_age: Mapping[int, float] | None = None
    """Rejected share of the tokens of each age."""
    plugin_metrics: Mapping[str, float] | None = None
    """Metrics reported by the user's own parts of the objective, by "advantage/NAME", "loss/NAME" or "weight/NAME"."""
    routing_differs: Mapping[int, float] | None = None
    """Share of tokens, by layer, that the trainer's router would have sent to other experts than the engine's router; None if routing
    is not recorded."""
    response_tokens_mean: float | None = None
    queue_depth: int | None = None
    """Trajectories left in the queue when the batch was leased."""
    dropped: Mapping[str, int] | None = None
    """Trajectories dropped since the controller started, by reason."""

    @property
    def begin(self) -> float:
        """Unix seconds at the beginning of the step."""
        return self.time - (self.step_seconds or 0.0)


class Resume(msgspec.Struct, frozen=True):
    """The trainer started from a checkpoint; supersedes earlier records of steps after `resumed_at`."""

    resumed_at: int
    time: float = 0.0


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a scorer or teacher; counts of samples since the controller started."""

    in_flight: int = 0
    """Gauge: samples in a call to the judge."""
    waiting: int = 0
    """Gauge: samples waiting for a slot, for the breaker or in backoff."""
    scored: int = 0
    retried: int = 0
    """Number of retries."""
    failed: Mapping[str, int] = {}
    """Failed samples by reason."""
    seconds: float = 0.0
    """Total time of the scored and failed samples."""
    breaker: str = "closed"


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a tool since the controller started."""

    calls: int = 0
    seconds: float = 0.0
    failures: Mapping[str, int] = {}
    """Failed calls by reason."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's counters. Except for gauges, they count trajectories (or tokens) since the controller started."""

    time: float
    version: int | None = None
    queue_depth: int | None = None
    """Gauge: trajectories ready for the trainer."""
    running: int | None = None
    """Gauge: trajectories being generated or scored."""
    started: int = 0
    accepted: int = 0
    rejected: Mapping[str, int] = {}
    dropped: Mapping[str, int] | int = 0
    requeued: Mapping[str, int] = {}
    """Trajectories whose prompts are sampled again, by reason."""
    generated_tokens: int = 0
    lost_tokens: int = 0
    """Generated tokens that were discarded because their response restarted."""
    recomputed_tokens: int = 0
    """Tokens of prefixes that were sent again because a response was interrupted."""
    scoring: Mapping[str, Scoring] = {}
    """Statistics by stage, "scorer" and "teacher", for stages in use."""
    tools: Mapping[str, Calls] = {}
    """Calls by the tool's name."""
    tokens_per_s: float | None = None
    """Gauge: sampled tokens per second since the last record."""
    engine_busy_share: Mapping[str, float] = {}
    """Gauge, 0 to 1: share of the time since the last record in which the engine had work."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: the same questions to one version.

    None: every episode failed; for `reward_stderr`, also if fewer than two questions have answers.
    """

    time: float
    """Unix seconds at the end of the evaluation."""
    version: int
    """Version that every engine served at its start."""
    version_min: int | None = None
    """Oldest version that sampled a token of the evaluation."""
    version_max: int | None = None
    """Newest version that sampled a token; later than `version` if weights were updated during the evaluation."""
    questions: int
    episodes: int
    reward_mean: float | None = None
    """Mean over questions of the mean reward of their episodes, without failed episodes."""
    reward_stderr: float | None = None
    """Standard error of `reward_mean`, over questions."""
    failed: Mapping[str, int] = {}
    """Episodes without a reward, by reason."""
    failed_share: float = 0.0
    """Failed share of the episodes."""
    response_tokens_mean: float | None = None
    """Mean number of sampled tokens per successful episode."""
    seconds: float
    skipped: int = 0
    """Evaluations skipped since the controller started, because another evaluation was running."""


class Span(msgspec.Struct, frozen=True):
    """`who` ("trainer.0", "engine.0") did `what` from `begin` to `end`, in Unix seconds."""

    who: str
    what: What
    begin: float
    end: float


Record = Step | Resume | Rollout | Evaluation | Span
