"""The records of a run, one JSON object per line. A reader ignores unknown fields and rejects wrong types.

metrics.jsonl           Step, one per optimizer step, and Resume once per resumed start; written by trainer rank 0
rollout.jsonl           Rollout, about one per second; written by the controller
evaluation.jsonl        Evaluation, one per evaluation; written by the controller
spans-trainer.jsonl     Span; written by trainer rank 0
spans-controller.jsonl  Span; written by the controller

Step, Resume and Span are here, Rollout and Evaluation in `rollout_schema`. A field with a `Metric` is a metric, and TensorBoard,
Prometheus, the terminal and docs/metrics.md know only this declaration; `report.plots` says which metrics share a figure. All of these show
metrics in the order of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from asyncmoe.telemetry.metric import Amount, Count, Metric

METRICS = "metrics.jsonl"
ROLLOUT = "rollout.jsonl"
EVALUATION = "evaluation.jsonl"
TRAINER_SPANS = "spans-trainer.jsonl"
CONTROLLER_SPANS = "spans-controller.jsonl"

What = Literal["wait", "train", "sync", "switch", "generate", "pause"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the trainer. A number that was not measured or is not finite is None (null).

    The step lasted from `time - step_seconds` to `time`, and includes waiting for a batch, training, and weight sync.
    """

    step: Annotated[int, "Number of optimizer steps taken, including this step and the warm-up."]
    phase: Annotated[Literal["warmup", "rl"], "The supervised warm-up, or reinforcement learning."]
    time: Annotated[float, "Unix seconds at the end of the step."]
    version: Annotated[Count, Metric("Version of the weights after the step.")] = None
    lineage: Annotated[Count, Metric("Restarts so far after which steps were retrained with other weights.")] = None

    # Learning
    reward_mean: Annotated[Amount, Metric("Mean reward of the batch.", "reward", word="reward")] = None
    reward_std: Annotated[Amount, Metric("Standard deviation of the batch's rewards.", "reward")] = None
    rewards: Annotated[
        Mapping[float, int] | None,
        Metric("Number of the batch's responses by reward; rewards are rounded to a grid of at most 22 values.", "responses", key="reward"),
    ] = None
    metrics: Annotated[
        Mapping[str, float] | None,
        Metric(
            "Mean of each metric beside the reward, over the responses that have it; at most 64 metrics, those that most responses have.",
            "the metric's own unit",
            key="name",
        ),
    ] = None
    step_reward_mean: Annotated[Amount, Metric("Mean of the rewards of single steps in the batch's responses.", "reward")] = None
    loss: Annotated[Amount, Metric("Loss.", "loss", word="loss")] = None
    grad_norm: Annotated[Amount, Metric("Gradient norm before clipping.", "norm")] = None
    lr: Annotated[Amount, Metric("Learning rate.", "a step")] = None
    entropy: Annotated[
        Amount, Metric("Entropy of the trainer's distribution over the whole vocabulary, per sampled token.", "nats a token")
    ] = None
    clip_fraction: Annotated[Amount, Metric("Share of the trained sampled tokens on which the clip acts.", "share of tokens")] = None
    response_tokens_mean: Annotated[Amount, Metric("Mean number of sampled tokens per response.", "tokens")] = None
    response_tokens_quantiles: Annotated[
        Mapping[str, float] | None, Metric("Quantiles of the number of sampled tokens per response, by share.", "tokens", key="quantile")
    ] = None
    truncated_fraction: Annotated[Amount, Metric("Share of responses that ended at their limit of tokens.", "share of responses")] = None

    # Staleness
    ages: Annotated[
        Mapping[int, int] | None, Metric("Number of sampled tokens by age in versions.", "tokens", key="age", over_updates="sum")
    ] = None
    staleness_max: Annotated[Amount, Metric("Age of the oldest sampled token.", "versions", word="age")] = None
    staleness_mean: Annotated[Amount, Metric("Mean age of the sampled tokens.", "versions")] = None

    # Agreement of engines and trainer
    logprob_diff_mean: Annotated[
        Amount, Metric("Mean absolute difference of the trainer's and the engine's log-probability, over sampled tokens.", "nats a token")
    ] = None
    logprob_diff_max_same_version: Annotated[
        Amount,
        Metric(
            "Largest absolute difference of the trainer's and the engine's log-probability, over tokens whose whole prefix was computed "
            "under the trainer's version.",
            "nats a token",
            over_updates="first",
        ),
    ] = None
    logprob_diff_mean_same_version: Annotated[
        Amount, Metric("Mean absolute difference over the tokens of `logprob_diff_max_same_version`.", "nats a token", over_updates="first")
    ] = None
    logprob_tokens_same_version: Annotated[
        Count, Metric("Tokens compared in `logprob_diff_max_same_version`; mostly 0 in asynchronous runs.", "tokens", over_updates="first")
    ] = None
    train_infer_kl: Annotated[
        Amount,
        Metric("KL(engine || trainer), by a non-negative estimator: the effect of staleness and train-inference mismatch.", "nats a token"),
    ] = None
    train_infer_kl_direct: Annotated[
        Amount,
        Metric("KL(engine || trainer), estimated as the mean log-probability difference; unbiased, can be negative.", "nats a token"),
    ] = None
    routing_mismatch: Annotated[
        Mapping[int, float] | None,
        Metric(
            "Share of tokens, by layer, that the trainer's router would have sent to other experts than the engine's router; absent if "
            "routing is not recorded.",
            "share of tokens",
            key="layer",
        ),
    ] = None
    ratio_mean: Annotated[Amount, Metric("Mean importance ratio pi_trainer / pi_engine.", "trainer / engine")] = None
    ess: Annotated[
        Amount, Metric("Effective sample size of the importance ratios, as a share of the sampled tokens.", "share of tokens")
    ] = None
    tis_capped_fraction: Annotated[Amount, Metric("Share of sampled tokens whose importance weight is capped.", "share of tokens")] = None
    correction_mean: Annotated[Amount, Metric("Mean importance weight of the trained sampled tokens.", "weight")] = None
    rejected_fraction: Annotated[
        Amount, Metric("Share of the sampled tokens that corrections excluded from the loss.", "share of tokens")
    ] = None
    rejected_by_rule: Annotated[
        Mapping[str, float] | None, Metric("Share of the sampled tokens that each rule alone would reject.", "share of tokens", key="rule")
    ] = None
    rejected_by_age: Annotated[
        Mapping[int, float] | None, Metric("Share of the tokens of each age that was rejected.", "share of tokens", key="age")
    ] = None
    plugin_metrics: Annotated[
        Mapping[str, float | None] | None,
        Metric(
            'Metrics of your own functions ("advantage/NAME", "loss/NAME", "weight/NAME") and of score centring '
            '("score_centering/tail", "score_centering/ratio").',
            "the metric's own unit",
            key="name",
        ),
    ] = None
    kl_reference: Annotated[Amount, Metric("KL(trainer || reference policy), estimated, per sampled token.", "nats a token")] = None
    kl_teacher: Annotated[
        Amount,
        Metric("KL(engine || teacher) per sampled token: the mean log-probability difference, which may be negative.", "nats a token"),
    ] = None
    anomalies: Annotated[
        Mapping[str, float | None] | None,
        Metric("Values that broke a rule of `verify`, by rule; absent if none did.", "the value's own unit", key="rule"),
    ] = None
    skipped_updates: Annotated[Count, Metric("Optimizer updates that `verify` refused; absent if there were none.", "updates")] = None

    # Idle time and queue
    queue_depth: Annotated[Count, Metric("Trajectories left in the queue when the batch was leased.", "trajectories", word="queue")] = None
    dropped: Annotated[
        Mapping[str, int] | None,
        Metric("Trajectories dropped so far, by reason; counted as in rollout.jsonl.", "trajectories", key="reason"),
    ] = None
    step_seconds: Annotated[Amount, Metric("Duration of the step, from the end of the one before if devices are shared.", "seconds")] = None
    wait_seconds: Annotated[
        Amount, Metric("Time the step waited for its batch, and then for its turn on shared devices.", "seconds", word="wait")
    ] = None
    train_seconds: Annotated[Amount, Metric("Time from the batch's arrival to the end of training.", "seconds", word="train")] = None

    # Weight updates
    sync_seconds: Annotated[
        Amount,
        Metric(
            "Duration of the weight sync of the latest published version, from the end of its optimizer step until every engine served it. "
            "Absent if an earlier step reported it, or no version was published.",
            "seconds",
            word="sync",
        ),
    ] = None
    sync_wait_seconds: Annotated[Amount, Metric("Time that the step waited for weight sync, during or after training.", "seconds")] = None
    checkpoint_s: Annotated[Amount, Metric("Time that training paused for a checkpoint since the last step.", "seconds")] = None
    checkpoint_wait_s: Annotated[Amount, Metric("Part of `checkpoint_s` spent waiting for the previous save.", "seconds")] = None
    switch_seconds: Annotated[
        Mapping[str, float] | None,
        Metric(
            "Time since the previous step in which devices changed hands, by part: the trainer releases memory (trainer_out), engines take "
            "theirs (engines_in), the weights move (update), responses are cut short (engines_drain), engines release memory "
            "(engines_out), and the trainer takes its own (trainer_in). Absent unless `placement` is colocated.",
            "seconds",
            key="part",
        ),
    ] = None
    pause_ms: Annotated[
        Amount, Metric("Longest pause of an engine during the update that `sync_seconds` measures.", "milliseconds", word="pause")
    ] = None
    sync_bytes: Annotated[
        Count,
        Metric(
            "Bytes that all engines together received in the update that `sync_seconds` measures. Absent unless updates may be deltas "
            "(`sync.delta`).",
            "bytes",
        ),
    ] = None
    sync_changed: Annotated[
        Amount,
        Metric("Share of weights whose bits, as engines store them, changed since the previous version. Absent after a full update."),
    ] = None

    # Throughput
    tokens: Annotated[Count, Metric("Trained tokens, prompt and response, over all ranks.", "tokens")] = None
    sampled_tokens: Annotated[Count, Metric("Trained tokens that engines sampled, all ranks.", "tokens", over_updates="sum")] = None
    tokens_per_s: Annotated[Amount, Metric("Trained tokens, prompt and response, per second of the step.", "tokens/s", word="tokens/s")] = (
        None
    )

    @property
    def begin(self) -> float:
        """Unix seconds at the beginning of the step."""
        return self.time - (self.step_seconds or 0.0)


class Resume(msgspec.Struct, frozen=True):
    """The trainer started from a checkpoint; supersedes earlier records of steps after `resumed_at`."""

    resumed_at: int
    time: float = 0.0
    epoch: int = 0
    """Number of earlier restarts of this trainer in place: 0 for each start of the whole run."""


class Span(msgspec.Struct, frozen=True):
    """`who` ("trainer.0", "engine.0") did `what` from `begin` to `end`, in Unix seconds."""

    who: str
    what: What
    begin: float
    end: float
