"""The records of a run, one JSON object a line. Fields a reader does not know are ignored; a wrong type is refused.

metrics.jsonl           Step, one per optimizer step, and Resume once per resumed start; written by trainer rank 0
rollout.jsonl           Rollout, about one a second; written by the controller
evaluation.jsonl        Evaluation, one for each; written by the controller
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
    """One step of the trainer. None: not measured in this step, or not finite. All times are in seconds unless named otherwise.

    The step lasted from `time - step_seconds` to `time` and consists of waiting for a batch, training and weight sync.
    """

    step: int
    """Optimizer steps taken, this one included; warm-up counts."""
    phase: Literal["warmup", "rl"]
    time: float
    """Unix seconds at the end of the step."""
    step_seconds: float | None = None
    wait_seconds: float | None = None
    train_seconds: float | None = None
    sync_seconds: float | None = None
    """Of the version that was published last: from the end of its optimizer step until every engine served it. None where an earlier
    step has said so, or none was published."""
    sync_wait_seconds: float | None = None
    """How long this step waited for weight sync, within training or after it."""
    pause_ms: float | None = None
    """Milliseconds the engine that stood still longest did so for that version."""
    version: int | None = None
    loss: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    step_reward_mean: float | None = None
    """Of the rewarded steps of the batch's responses."""
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None
    """Trained tokens, prompt and response, over all ranks."""
    tokens_per_s: float | None = None
    staleness_max: float | None = None
    """Versions; age of the oldest sampled token."""
    staleness_mean: float | None = None
    ages: Mapping[int, int] | None = None
    """Sampled tokens by age in versions."""
    logprob_diff_max_same_version: float | None = None
    """Nats; largest |trainer - engine| over tokens whose whole prefix was computed under the trainer's version."""
    logprob_diff_mean_same_version: float | None = None
    """Mean of the same."""
    kl_engine: float | None = None
    """Nats a sampled token; KL(engine || trainer), estimated: what staleness and the difference of the two programs make together."""
    kl_reference: float | None = None
    """Nats a sampled token; KL(trainer || reference policy), estimated."""
    kl_teacher: float | None = None
    """Nats a sampled token; KL(engine || teacher), estimated as the mean difference of log-probabilities: unbiased, may be negative."""
    entropy: float | None = None
    """Nats a sampled token; of the trainer's distribution over the whole vocabulary."""
    clip_fraction: float | None = None
    tis_capped_fraction: float | None = None
    ratio_mean: float | None = None
    """Of pi_trainer / pi_engine over sampled tokens."""
    ratio_quantiles: Mapping[str, float] | None = None
    """Of the same, by share."""
    ess: float | None = None
    """Effective sample size of those ratios, as a share of the sampled tokens."""
    rejected_fraction: float | None = None
    """Share of the sampled tokens that corrections kept out of the loss."""
    rejected_by_rule: Mapping[str, float] | None = None
    """The same by the rule that rejects them, each as if it were the only one."""
    rejected_by_age: Mapping[int, float] | None = None
    """Share of the tokens of each age."""
    routing_differs: Mapping[int, float] | None = None
    """By layer, the share of tokens that the trainer's router would have sent to other experts than the engine's did; None where
    routing is not kept."""
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
    """The trainer started from a checkpoint: records of steps after `resumed_at` no longer count."""

    resumed_at: int
    time: float = 0.0


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """A scorer or teacher; counts of samples since the controller started."""

    in_flight: int = 0
    """Gauge: under way at the judge."""
    waiting: int = 0
    """Gauge: waiting for their turn, for the breaker or before another call."""
    scored: int = 0
    retried: int = 0
    """Calls beyond a sample's first."""
    failed: Mapping[str, int] = {}
    """By reason."""
    seconds: float = 0.0
    """That the scored and failed spent there, in all."""
    breaker: str = "closed"


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a tool since the controller started."""

    calls: int = 0
    seconds: float = 0.0
    failures: Mapping[str, int] = {}
    """By reason."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's counters; all but the gauges count trajectories (tokens) since the controller started."""

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
    """Trajectories whose prompts are started again, by reason."""
    generated_tokens: int = 0
    lost_tokens: int = 0
    """Of those, thrown away because their response started again."""
    recomputed_tokens: int = 0
    """Tokens of prefixes that were sent again because a response was cut short."""
    scoring: Mapping[str, Scoring] = {}
    """By "scorer" and "teacher", where those are asked."""
    tools: Mapping[str, Calls] = {}
    """By the tool's name."""
    tokens_per_s: float | None = None
    """Gauge: sampled tokens a second since the last record."""
    engine_busy_share: Mapping[str, float] = {}
    """Gauge, 0 to 1: share of the time since the last record in which the engine had work."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The same questions to one version. None: every episode failed, or, of the standard error, fewer than two questions were answered."""

    time: float
    """Unix seconds at its end."""
    version: int
    """What every engine served when it began."""
    version_min: int | None = None
    """Oldest version a token of it was sampled by."""
    version_max: int | None = None
    """Newest one: later than `version` when weights landed meanwhile."""
    questions: int
    episodes: int
    reward_mean: float | None = None
    """Mean over questions of the mean reward of their episodes; those that failed are left out."""
    reward_stderr: float | None = None
    """Standard error of it, over questions."""
    failed: Mapping[str, int] = {}
    """Episodes without a reward, by reason."""
    failed_share: float = 0.0
    """Of the episodes."""
    response_tokens_mean: float | None = None
    """Sampled tokens of an episode that did not fail."""
    seconds: float
    skipped: int = 0
    """Evaluations that were due while another was running, since the controller started."""


class Span(msgspec.Struct, frozen=True):
    """`who` ("trainer.0", "engine.0") did `what` from `begin` to `end`, in Unix seconds."""

    who: str
    what: What
    begin: float
    end: float


Record = Step | Resume | Rollout | Evaluation | Span
