"""The records of a run, one JSON object per line. A reader ignores unknown fields, accepts former names (`records.RENAMED`) and rejects
wrong types.

metrics.jsonl           Step, one per optimizer step, and Resume once per resumed start; written by trainer rank 0
rollout.jsonl           Rollout, about one per second; written by the controller
evaluation.jsonl        Evaluation, one per evaluation; written by the controller
spans-trainer.jsonl     Span; written by trainer rank 0
spans-controller.jsonl  Span; written by the controller

Step, Resume and Span are here, Rollout and Evaluation in `rollout_schema`. A field with a `Metric` is a metric, and this declaration is all
that TensorBoard, Prometheus, the live view, the report and docs/metrics.md know of it. They show metrics in the order of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from asyncmoe.telemetry.metric import Metric, Plot

METRICS = "metrics.jsonl"
ROLLOUT = "rollout.jsonl"
EVALUATION = "evaluation.jsonl"
TRAINER_SPANS = "spans-trainer.jsonl"
CONTROLLER_SPANS = "spans-controller.jsonl"

AGREEMENT: Literal["Agreement of engines and trainer"] = "Agreement of engines and trainer"

What = Literal["wait", "train", "sync", "generate", "pause"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the trainer. None: not measured in this step, or not finite.

    The step lasted from `time - step_seconds` to `time`: waiting for a batch, training, and weight sync.
    """

    step: Annotated[int, "Number of optimizer steps taken, including this step and the warm-up."]
    phase: Annotated[Literal["warmup", "rl"], "The supervised warm-up, or reinforcement learning."]
    time: Annotated[float, "Unix seconds at the end of the step."]
    version: Annotated[int | None, Metric("Version of the weights after the step.")] = None

    # Learning
    reward_mean: Annotated[
        float | None,
        Metric("Mean reward of the batch.", "reward", word="reward", panel=True, plot=Plot("Learning", "Mean reward", smooth=True)),
    ] = None
    reward_std: Annotated[float | None, Metric("Standard deviation of the batch's rewards.", "reward")] = None
    step_reward_mean: Annotated[float | None, Metric("Mean reward of the rewarded steps of the batch's responses.", "reward")] = None
    loss: Annotated[
        float | None, Metric("Loss.", "loss", word="loss", panel=True, plot=Plot("Learning", "Policy loss", colour="red", smooth=True))
    ] = None
    grad_norm: Annotated[
        float | None, Metric("Gradient norm before clipping.", "norm", plot=Plot("Learning", "Gradient norm", colour="purple"))
    ] = None
    lr: Annotated[float | None, Metric("Learning rate.")] = None
    entropy: Annotated[
        float | None, Metric("Entropy of the trainer's distribution over the whole vocabulary, per sampled token.", "nats a token")
    ] = None
    clip_fraction: Annotated[float | None, Metric("Share of the trained sampled tokens on which the clip acts.", "share of tokens")] = None
    response_tokens_mean: Annotated[float | None, Metric("Mean number of sampled tokens per response.", "tokens")] = None

    # Staleness
    ages: Annotated[
        Mapping[int, int] | None,
        Metric(
            "Number of sampled tokens by age in versions.",
            "tokens",
            key="age",
            plot=Plot("Staleness", "Age of the trained tokens", bars="share", keys="age in versions"),
            over_updates="sum",
        ),
    ] = None
    staleness_max: Annotated[
        float | None,
        Metric(
            "Age of the oldest sampled token.",
            "versions",
            word="age",
            plot=Plot("Staleness", "Age in each batch", curve="oldest token", colour="orange", from_zero=True),
        ),
    ] = None
    staleness_mean: Annotated[
        float | None,
        Metric("Mean age of the sampled tokens.", "versions", plot=Plot("Staleness", "Age in each batch", curve="mean", from_zero=True)),
    ] = None

    # Agreement of engines and trainer
    logprob_diff_mean: Annotated[float | None, Metric("Mean |trainer - engine| log-probability per sampled token.", "nats a token")] = None
    logprob_diff_max_same_version: Annotated[
        float | None,
        Metric(
            "Largest |trainer - engine| log-probability over tokens whose whole prefix was computed under the trainer's version.",
            "nats a token",
            over_updates="first",
        ),
    ] = None
    logprob_diff_mean_same_version: Annotated[
        float | None, Metric("Mean |trainer - engine| log-probability over the same tokens.", "nats a token", over_updates="first")
    ] = None
    train_infer_kl: Annotated[
        float | None,
        Metric(
            "KL(engine || trainer), estimated, never negative: the combined effect of staleness and train-inference mismatch.",
            "nats a token",
            plot=Plot(AGREEMENT, "KL(engine ‖ trainer)", colour="purple", from_zero=True),
        ),
    ] = None
    train_infer_kl_direct: Annotated[
        float | None,
        Metric("The same divergence, estimated as the mean log-probability difference: unbiased, may be negative.", "nats a token"),
    ] = None
    routing_mismatch: Annotated[
        Mapping[int, float] | None,
        Metric(
            "Share of tokens, by layer, that the trainer's router would have sent to other experts than the engine's router; absent if "
            "routing is not recorded.",
            "share of tokens",
            key="layer",
            plot=Plot(AGREEMENT, "Tokens the trainer's router would send elsewhere", colour="orange", bars="mean", keys="layer"),
        ),
    ] = None
    ratio_mean: Annotated[float | None, Metric("Mean importance ratio pi_trainer / pi_engine.", "trainer / engine")] = None
    ratio_quantiles: Annotated[
        Mapping[str, float] | None,
        Metric(
            "Quantiles of the importance ratio, by share.",
            "trainer / engine",
            key="quantile",
            plot=Plot(AGREEMENT, "Importance ratio, quantiles", colour="grey"),
        ),
    ] = None
    ess: Annotated[
        float | None, Metric("Effective sample size of the importance ratios, as a share of the sampled tokens.", "share of tokens")
    ] = None
    tis_capped_fraction: Annotated[
        float | None, Metric("Share of the sampled tokens whose importance weight is capped.", "share of tokens")
    ] = None
    correction_mean: Annotated[float | None, Metric("Mean importance weight of the trained sampled tokens.", "weight")] = None
    rejected_fraction: Annotated[
        float | None, Metric("Share of the sampled tokens that corrections excluded from the loss.", "share of tokens")
    ] = None
    rejected_by_rule: Annotated[
        Mapping[str, float] | None,
        Metric(
            "Share of the sampled tokens that each rule alone would reject.",
            "share of tokens",
            key="rule",
            plot=Plot(AGREEMENT, "Rejected tokens", from_zero=True),
        ),
    ] = None
    rejected_by_age: Annotated[
        Mapping[int, float] | None, Metric("Rejected share of the tokens of each age.", "share of tokens", key="age")
    ] = None
    plugin_metrics: Annotated[
        Mapping[str, float | None] | None,
        Metric(
            'Metrics of the user\'s own parts of the objective, by "advantage/NAME", "loss/NAME" or "weight/NAME".',
            "the function's own unit",
            key="name",
            plot=Plot("Learning", "Your function's", apart=True),
        ),
    ] = None
    kl_reference: Annotated[
        float | None,
        Metric(
            "KL(trainer || reference policy), estimated, per sampled token.",
            "nats a token",
            plot=Plot(AGREEMENT, "KL(trainer ‖ reference)", colour="purple", from_zero=True),
        ),
    ] = None
    kl_teacher: Annotated[
        float | None,
        Metric(
            "KL(engine || teacher) per sampled token, estimated as the mean log-probability difference: unbiased, may be negative.",
            "nats a token",
        ),
    ] = None

    # Idle time and queue
    queue_depth: Annotated[
        int | None, Metric("Trajectories left in the queue when the batch was leased.", "trajectories", word="queue")
    ] = None
    dropped: Annotated[
        Mapping[str, int] | None, Metric("Trajectories dropped since the controller started, by reason.", "trajectories", key="reason")
    ] = None
    step_seconds: Annotated[float | None, Metric("Duration of the step.", "seconds")] = None
    wait_seconds: Annotated[float | None, Metric("Time the step waited for its batch.", "seconds", word="wait")] = None
    train_seconds: Annotated[float | None, Metric("Time from the batch's arrival to the end of training.", "seconds", word="train")] = None

    # Weight updates
    sync_seconds: Annotated[
        float | None,
        Metric(
            "Weight sync of the latest published version: from the end of its optimizer step until every engine served it. Absent if an "
            "earlier step already reported it, or no version was published.",
            "seconds",
            word="sync",
            plot=Plot("Weight updates", "Weight sync", colour="red", from_zero=True),
        ),
    ] = None
    sync_wait_seconds: Annotated[
        float | None, Metric("Time that the step waited for weight sync, during or after training.", "seconds")
    ] = None
    pause_ms: Annotated[
        float | None,
        Metric(
            "Longest pause of an engine for that version.",
            "milliseconds",
            word="pause",
            plot=Plot("Weight updates", "Engines' pause for an update", colour="red", from_zero=True),
        ),
    ] = None

    # Throughput
    tokens: Annotated[int | None, Metric("Trained tokens, prompt and response, over all ranks.", "tokens")] = None
    sampled_tokens: Annotated[int | None, Metric("Trained tokens that engines sampled, all ranks.", "tokens", over_updates="sum")] = None
    tokens_per_s: Annotated[
        float | None,
        Metric(
            "Trained tokens, prompt and response, per second of the step.",
            "tokens/s",
            word="tokens/s",
            plot=Plot("Throughput", "Trained tokens", from_zero=True),
        ),
    ] = None

    @property
    def begin(self) -> float:
        """Unix seconds at the beginning of the step."""
        return self.time - (self.step_seconds or 0.0)


class Resume(msgspec.Struct, frozen=True):
    """The trainer started from a checkpoint; supersedes earlier records of steps after `resumed_at`."""

    resumed_at: int
    time: float = 0.0


class Span(msgspec.Struct, frozen=True):
    """`who` ("trainer.0", "engine.0") did `what` from `begin` to `end`, in Unix seconds."""

    who: str
    what: What
    begin: float
    end: float
