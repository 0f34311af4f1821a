"""The records of a run, one JSON object per line. A reader ignores unknown fields and rejects wrong types.

metrics.jsonl           Step, one per optimizer step, and Resume once per resumed start; written by trainer rank 0
rollout.jsonl           Rollout, about one per second; written by the controller
evaluation.jsonl        Evaluation, one per evaluation; written by the controller
spans-trainer.jsonl     Span; written by trainer rank 0
spans-controller.jsonl  Span; written by the controller

Step, Resume and Span are here, the first fields of Step in `learning_schema`, Rollout and Evaluation in `rollout_schema`. A field with a
`Metric` is a metric, and this declaration is all that TensorBoard, Prometheus, the terminal, the report and docs/metrics.md know of it.
They show metrics in the order of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from asyncmoe.telemetry.learning_schema import Learning
from asyncmoe.telemetry.metric import Metric, Plot

METRICS = "metrics.jsonl"
ROLLOUT = "rollout.jsonl"
EVALUATION = "evaluation.jsonl"
TRAINER_SPANS = "spans-trainer.jsonl"
CONTROLLER_SPANS = "spans-controller.jsonl"

AGREEMENT: Literal["Agreement of engines and trainer"] = "Agreement of engines and trainer"

What = Literal["wait", "train", "sync", "generate", "pause"]


class Step(Learning, frozen=True, kw_only=True):
    """One step of the trainer. None: not measured in this step, or not finite.

    The step lasted from `time - step_seconds` to `time`: waiting for a batch, training, and weight sync.
    """

    # Staleness
    ages: Annotated[
        Mapping[int, int] | None,
        Metric(
            "Number of sampled tokens by age in versions.",
            "tokens",
            key="age",
            plot=Plot("Staleness", "Age of the trained tokens", heat="share"),
            over_updates="sum",
        ),
    ] = None
    staleness_max: Annotated[
        float | None,
        Metric(
            "Age of the oldest sampled token.",
            "versions",
            word="age",
            plot=Plot("Staleness", "Age in each batch", curve="oldest token", from_zero=True),
        ),
    ] = None
    staleness_mean: Annotated[
        float | None,
        Metric("Mean age of the sampled tokens.", "versions", plot=Plot("Staleness", "Age in each batch", curve="mean", from_zero=True)),
    ] = None

    # Agreement of engines and trainer
    logprob_diff_mean: Annotated[
        float | None,
        Metric(
            "Mean |trainer - engine| log-probability per sampled token.",
            "nats a token",
            plot=Plot(AGREEMENT, "Log-probability difference", curve="every token", from_zero=True),
        ),
    ] = None
    logprob_diff_max_same_version: Annotated[
        float | None,
        Metric(
            "Largest |trainer - engine| log-probability over tokens whose whole prefix was computed under the trainer's version.",
            "nats a token",
            plot=Plot(AGREEMENT, "Largest log-probability difference at the same version", from_zero=True),
            over_updates="first",
        ),
    ] = None
    logprob_diff_mean_same_version: Annotated[
        float | None,
        Metric(
            "Mean |trainer - engine| log-probability over the same tokens.",
            "nats a token",
            plot=Plot(AGREEMENT, "Log-probability difference", curve="same version", from_zero=True),
            over_updates="first",
        ),
    ] = None
    logprob_tokens_same_version: Annotated[
        int | None,
        Metric("Number of the same tokens. 0 in most steps of an asynchronous run.", "tokens", over_updates="first"),
    ] = None
    train_infer_kl: Annotated[
        float | None,
        Metric(
            "KL(engine || trainer), estimated, never negative: the combined effect of staleness and train-inference mismatch.",
            "nats a token",
            plot=Plot(AGREEMENT, "KL(engine ‖ trainer)", from_zero=True),
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
            plot=Plot(AGREEMENT, "Tokens the trainer's router would send elsewhere", heat="value"),
        ),
    ] = None
    ratio_mean: Annotated[float | None, Metric("Mean importance ratio pi_trainer / pi_engine.", "trainer / engine")] = None
    ess: Annotated[
        float | None,
        Metric(
            "Effective sample size of the importance ratios, as a share of the sampled tokens.",
            "share of tokens",
            plot=Plot(AGREEMENT, "Effective sample size", from_zero=True),
        ),
    ] = None
    tis_capped_fraction: Annotated[
        float | None,
        Metric(
            "Share of the sampled tokens whose importance weight is capped.",
            "share of tokens",
            plot=Plot(AGREEMENT, "Capped tokens", from_zero=True),
        ),
    ] = None
    correction_mean: Annotated[
        float | None,
        Metric("Mean importance weight of the trained sampled tokens.", "weight", plot=Plot(AGREEMENT, "Mean importance weight")),
    ] = None
    rejected_fraction: Annotated[
        float | None,
        Metric(
            "Share of the sampled tokens that corrections excluded from the loss.",
            "share of tokens",
            plot=Plot(AGREEMENT, "Rejected tokens", curve="all", from_zero=True),
        ),
    ] = None
    rejected_by_rule: Annotated[
        Mapping[str, float] | None,
        Metric(
            "Share of the sampled tokens that each rule alone would reject.",
            "share of tokens",
            key="rule",
            plot=Plot(AGREEMENT, "Rejected tokens", curve="by", from_zero=True),
        ),
    ] = None
    rejected_by_age: Annotated[
        Mapping[int, float] | None,
        Metric(
            "Rejected share of the tokens of each age.",
            "share of tokens",
            key="age",
            plot=Plot(AGREEMENT, "Rejected tokens by age", heat="value"),
        ),
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
            plot=Plot(AGREEMENT, "KL(trainer ‖ reference)", from_zero=True),
        ),
    ] = None
    kl_teacher: Annotated[
        float | None,
        Metric(
            "KL(engine || teacher) per sampled token, estimated as the mean log-probability difference: unbiased, may be negative.",
            "nats a token",
            plot=Plot(AGREEMENT, "KL(engine ‖ teacher)"),
        ),
    ] = None

    anomalies: Annotated[
        Mapping[str, float | None] | None,
        Metric("Values that broke a rule of `verify`, by rule; absent if none did.", "the value's own unit", key="rule"),
    ] = None
    skipped_updates: Annotated[int | None, Metric("Optimizer updates that `verify` refused; absent if none was.", "updates")] = None

    # Idle time and queue
    queue_depth: Annotated[
        int | None, Metric("Trajectories left in the queue when the batch was leased.", "trajectories", word="queue")
    ] = None
    dropped: Annotated[
        Mapping[str, int] | None,
        Metric("Trajectories dropped so far, by reason; counted as in rollout.jsonl.", "trajectories", key="reason"),
    ] = None
    step_seconds: Annotated[
        float | None, Metric("Duration of the step.", "seconds", plot=Plot("Throughput", "Time of a step", curve="all", from_zero=True))
    ] = None
    wait_seconds: Annotated[
        float | None,
        Metric(
            "Time the step waited for its batch.",
            "seconds",
            word="wait",
            plot=Plot("Throughput", "Time of a step", curve="wait for a batch", from_zero=True),
        ),
    ] = None
    train_seconds: Annotated[
        float | None,
        Metric(
            "Time from the batch's arrival to the end of training.",
            "seconds",
            word="train",
            plot=Plot("Throughput", "Time of a step", curve="train", from_zero=True),
        ),
    ] = None

    # Weight updates
    sync_seconds: Annotated[
        float | None,
        Metric(
            "Weight sync of the latest published version: from the end of its optimizer step until every engine served it. Absent if an "
            "earlier step already reported it, or no version was published.",
            "seconds",
            word="sync",
            plot=Plot("Weight updates", "Weight sync", from_zero=True),
        ),
    ] = None
    sync_wait_seconds: Annotated[
        float | None, Metric("Time that the step waited for weight sync, during or after training.", "seconds")
    ] = None
    checkpoint_s: Annotated[float | None, Metric("Time that training stood still for a checkpoint since the last step.", "seconds")] = None
    checkpoint_wait_s: Annotated[float | None, Metric("The part of it in which a save waited for the one before.", "seconds")] = None
    pause_ms: Annotated[
        float | None,
        Metric(
            "Longest pause of an engine for that version.",
            "milliseconds",
            word="pause",
            plot=Plot("Weight updates", "Engines' pause for an update", from_zero=True),
        ),
    ] = None
    sync_bytes: Annotated[
        int | None,
        Metric("Bytes that all engines together receive for that version. Absent unless updates may be deltas (`sync.delta`).", "bytes"),
    ] = None
    sync_changed: Annotated[
        float | None,
        Metric(
            "Share of weights whose bits, as engines store them, changed since the version before. Present: it came as a delta. Absent: "
            "it was sent in full."
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
    epoch: int = 0
    """Number of times this trainer was started again in place before: 0 for each start of the whole run."""


class Span(msgspec.Struct, frozen=True):
    """`who` ("trainer.0", "engine.0") did `what` from `begin` to `end`, in Unix seconds."""

    who: str
    what: What
    begin: float
    end: float
