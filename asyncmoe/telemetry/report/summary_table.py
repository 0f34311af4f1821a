"""The page's words about a run: what it was, advice, and the summary's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncmoe.telemetry.advice import advise
from asyncmoe.telemetry.format import duration, number, percent
from asyncmoe.telemetry.gauges import gauge
from asyncmoe.telemetry.rejected import describe, rejected, scored
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.summary import Summary

Row = tuple[str, str, str]
"""What, its value, and what it means."""


def what_it_was(run: RunRecords, summary: Summary) -> str:
    """Return the length of the run in words."""
    warmup = len(run.steps) - summary.steps
    parts = [f"{summary.steps} RL steps in {duration(summary.wall_seconds)}" if summary.steps else "no RL step yet"]
    parts += [f"after {warmup} warm-up steps"] if warmup else []
    parts += [f"{len(run.engines)} engine{'s' if len(run.engines) > 1 else ''}"] if run.engines else []
    parts += [f"started {len(run.sessions)} times"] if len(run.sessions) > 1 else []
    return " · ".join(parts)


def advice(run: RunRecords, summary: Summary) -> list[str]:
    """Return what to change, in sentences."""
    gauges = replace(gauge(run.rl, run.rollout), trainer_idle=summary.trainer_idle_share, engine_idle=summary.engine_idle_share)
    return list(advise(gauges))


def rows(run: RunRecords, summary: Summary) -> Sequence[Row]:
    """Return the rows of the summary."""
    diff = summary.max_abs_logprob_diff_same_version
    reward = f"{number(summary.reward_first)} → {number(summary.reward_last)}"
    found = [
        ("Reward", reward, "mean of the first and of the last 5 RL steps"),
        ("Throughput", number(summary.tokens_per_s, "tokens/s"), "trained tokens, prompt and response, over RL time"),
        ("Overlap", percent(summary.overlap_share), "of the training time, at least one engine was generating"),
        ("Trainer idle", percent(summary.trainer_idle_share), "of RL time, waiting for a batch"),
        ("Engines idle", percent(summary.engine_idle_share), "of RL time, generating nothing; mean over engines"),
        ("Weight sync", number(summary.sync_seconds_median, "s"), "median of the updates"),
        ("Pause", number(summary.pause_ms_median, "ms"), "median of the updates: how long the engines stood still"),
        (
            "Oldest token",
            number(summary.max_staleness_seen, "version" if summary.max_staleness_seen == 1 else "versions"),
            "largest age trained on",
        ),
        (
            "Log-prob difference",
            number(diff, "nats", 2),
            f"largest |trainer - engine| on {number(summary.same_version_tokens or 0)} trained tokens of the same version, of "
            f"{summary.same_version_versions or 0} versions",
        ),
        (
            "The same on probe tokens",
            number(summary.max_abs_probe_diff, "nats", 2),
            f"{number(summary.probe_tokens or 0)} tokens of {summary.probe_versions or 0} versions (verify.probe_every)",
        ),
        ("KL engine to trainer", number(summary.train_infer_kl_mean, "nats", 2), "a token, mean over RL steps; staleness included"),
        (
            "Routed otherwise",
            percent(summary.routing_mismatch_mean),
            "of tokens, by the trainer's router; mean over layers",
        ),
    ]
    if summary.evaluation_first is not None and summary.evaluation_last is not None:
        found.insert(1, _evaluation(summary.evaluation_first, summary.evaluation_last))
    found += [(f"Scoring: {name}", number(stage.scored), describe(stage)) for name, stage in scored(run.rollout).items()]
    if summary.trainer_restarts:
        found.append(
            ("Trainer restarts", number(summary.trainer_restarts), "starts in place after the trainer was lost (trainer.max_restarts)")
        )
    if run.rollout:
        found.append(("Rejected", percent(summary.rejected_share), f"trajectories: {rejected(run.rollout)}"))
    return found


def _evaluation(first: Evaluation, last: Evaluation) -> tuple[str, str, str]:
    error = "" if last.reward_stderr is None else f" ± {number(last.reward_stderr)}"
    what = f"mean reward of versions {first.version} and {last.version}; {last.episodes} episodes, {percent(last.failed_share)} failed"
    return f"Evaluation {first.name}".strip(), f"{number(first.reward_mean)} → {number(last.reward_mean)}{error}", what
