"""The report's named figures. Metrics in none of them are drawn in the last section, one figure each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Step

Drawn = Step | Rollout | Evaluation
LEARNING, STALENESS, AGREEMENT, IDLE = "Learning", "Staleness", "Agreement of engines and trainer", "Idle time and queue"
UPDATES, THROUGHPUT, REST = "Weight updates", "Throughput", "Everything else that is recorded"
SECTIONS: Mapping[str, str] = {
    LEARNING: "",
    STALENESS: "Age: the trainer's version minus the version that sampled the token.",
    AGREEMENT: "How much engines and trainer differ on the same tokens. Where routing is kept, tokens "
    "that the trainer's router would have sent elsewhere are trained through the experts that the engine chose.",
    IDLE: "Who waits for whom.",
    UPDATES: "",
    THROUGHPUT: "",
    REST: "",
}
"""Titles and notes of the sections with figures of metrics."""


@dataclass(frozen=True)
class Plot:
    """A figure of metrics of one kind of record. Metrics of steps are drawn over RL steps, those of rollout records over minutes, and those
    of evaluations over the step evaluated. A mapping is one curve for each key, or a heat map.

    Attributes:
        curves: names in the legend by field; a mapping's key follows the name. The metrics share one unit.
        from_zero: the axis begins at 0.
        heat: draw a mapping from numbers as a heat map over the steps: its values, or their shares of the step's total.
        apart: draw every key of a mapping in its own figure, titled with the key, because units may differ.
        error: field with the standard error of each value, drawn as error bars.
    """

    kind: type[Drawn]
    section: str
    title: str
    curves: Mapping[str, str]
    from_zero: bool = True
    heat: Literal["value", "share"] | None = None
    apart: bool = False
    error: str = ""


PLOTS = (
    Plot(Evaluation, LEARNING, "Evaluation", {"reward_mean": ""}, from_zero=False, error="reward_stderr"),
    Plot(Evaluation, LEARNING, "Evaluation, pass@k by k", {"pass_at": ""}, from_zero=False, error="pass_at_stderr"),
    Plot(Evaluation, LEARNING, "Evaluation, metric", {"metrics": ""}, from_zero=False, apart=True),
    Plot(Step, LEARNING, "Mean reward", {"reward_mean": ""}, from_zero=False),
    Plot(Step, LEARNING, "Reward spread", {"reward_std": ""}),
    Plot(Step, LEARNING, "Distribution of rewards", {"rewards": ""}, heat="share"),
    Plot(Step, LEARNING, "Metric", {"metrics": ""}, from_zero=False, apart=True),
    Plot(Step, LEARNING, "Mean reward of steps", {"step_reward_mean": ""}, from_zero=False),
    Plot(Step, LEARNING, "Policy loss", {"loss": ""}, from_zero=False),
    Plot(Step, LEARNING, "Gradient norm", {"grad_norm": ""}, from_zero=False),
    Plot(Step, LEARNING, "Learning rate", {"lr": ""}),
    Plot(Step, LEARNING, "Entropy", {"entropy": ""}, from_zero=False),
    Plot(Step, LEARNING, "Clipped tokens", {"clip_fraction": ""}),
    Plot(Step, LEARNING, "Response length", {"response_tokens_mean": "mean", "response_tokens_quantiles": "quantile"}),
    Plot(Step, LEARNING, "Truncated responses", {"truncated_fraction": ""}),
    Plot(Step, LEARNING, "Objective:", {"plugin_metrics": ""}, from_zero=False, apart=True),
    Plot(Step, STALENESS, "Age of the trained tokens", {"ages": ""}, heat="share"),
    Plot(Step, STALENESS, "Age in each batch", {"staleness_max": "oldest token", "staleness_mean": "mean"}),
    Plot(
        Step,
        AGREEMENT,
        "Log-probability difference",
        {"logprob_diff_mean": "every token", "logprob_diff_mean_same_version": "same version"},
    ),
    Plot(Step, AGREEMENT, "Largest log-probability difference at the same version", {"logprob_diff_max_same_version": ""}),
    Plot(Step, AGREEMENT, "KL(engine ‖ trainer)", {"train_infer_kl": ""}),
    Plot(Step, AGREEMENT, "Tokens the trainer's router would send elsewhere", {"routing_mismatch": ""}, heat="value"),
    Plot(Step, AGREEMENT, "Effective sample size", {"ess": ""}),
    Plot(Step, AGREEMENT, "Capped tokens", {"tis_capped_fraction": ""}),
    Plot(Step, AGREEMENT, "Mean importance weight", {"correction_mean": ""}, from_zero=False),
    Plot(Step, AGREEMENT, "Rejected tokens", {"rejected_fraction": "all", "rejected_by_rule": "by"}),
    Plot(Step, AGREEMENT, "Rejected tokens by age", {"rejected_by_age": ""}, heat="value"),
    Plot(Step, AGREEMENT, "KL(trainer ‖ reference)", {"kl_reference": ""}),
    Plot(Step, AGREEMENT, "KL(engine ‖ teacher)", {"kl_teacher": ""}, from_zero=False),
    Plot(Rollout, IDLE, "Queue", {"running": "in flight", "queue_depth": "queued"}),
    Plot(Rollout, IDLE, "Engines at work", {"engine_utilization": ""}),
    Plot(Step, UPDATES, "Weight sync", {"sync_seconds": ""}),
    Plot(Step, UPDATES, "Switches of shared devices", {"switch_seconds": ""}),
    Plot(Step, UPDATES, "Engines' pause for an update", {"pause_ms": ""}),
    Plot(Step, THROUGHPUT, "Time of a step", {"step_seconds": "all", "wait_seconds": "wait for a batch", "train_seconds": "train"}),
    Plot(Step, THROUGHPUT, "Trained tokens", {"tokens_per_s": ""}),
    Plot(Rollout, THROUGHPUT, "Sampled tokens", {"tokens_per_s": ""}),
)
