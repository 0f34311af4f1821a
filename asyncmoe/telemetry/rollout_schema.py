"""The controller's records; see `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from asyncmoe.telemetry.metric import Amount, Count, Metric


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a scorer or teacher; counts of samples since the controller started."""

    in_flight: Annotated[int, Metric("Samples in a call to the scorer or teacher.", "samples")] = 0
    waiting: Annotated[int, Metric("Samples waiting for a slot or in backoff.", "samples")] = 0
    scored: Annotated[int, Metric("Scored samples.", "samples")] = 0
    retried: Annotated[int, Metric("Retries.")] = 0
    failed: Annotated[Mapping[str, int], Metric("Failed samples by reason.", "samples", key="reason")] = {}
    seconds: Annotated[float, Metric("Total time of the scored and failed samples.", "seconds")] = 0.0
    wait_seconds: Annotated[float, Metric("Part of `scoring_seconds` outside calls: waiting for a slot or in backoff.", "seconds")] = 0.0


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a tool since the controller started."""

    calls: Annotated[int, Metric("Calls of the tool.")] = 0
    seconds: Annotated[float, Metric("Total time of the calls.", "seconds")] = 0.0
    failures: Annotated[Mapping[str, int], Metric("Failed calls by reason.", key="reason")] = {}


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's counters and gauges.

    Started, accepted, rejected, dropped and requeued trajectories are counted since the run began: a restarted controller takes the counts
    over from the log. Other counters, such as those of tokens, start again at 0 when the controller restarts, unless their descriptions say
    otherwise.
    """

    time: Annotated[float, "Unix seconds."]
    version: Annotated[Count, Metric("Version that the engines serve.", source="queue")] = None
    running: Annotated[Count, Metric("Trajectories being generated or scored, at the moment.", "trajectories", source="queue")] = None
    queue_depth: Annotated[Count, Metric("Trajectories ready for the trainer, at the moment.", "trajectories")] = None
    started: Annotated[int, Metric("Started trajectories.", "trajectories", source="queue")] = 0
    accepted: Annotated[int, Metric("Accepted trajectories.", "trajectories", source="queue")] = 0
    rejected: Annotated[Mapping[str, int], Metric("Rejected trajectories by reason.", "trajectories", key="reason", source="queue")] = {}
    dropped: Annotated[Mapping[str, int], Metric("Dropped trajectories by reason.", "trajectories", key="reason", source="queue")] = {}
    requeued: Annotated[
        Mapping[str, int], Metric("Trajectories whose prompts are sampled again, by reason.", "trajectories", key="reason", source="queue")
    ] = {}
    generated_tokens: Annotated[int, Metric("Sampled tokens.", "tokens", source="pool")] = 0
    lost_tokens: Annotated[int, Metric("Sampled tokens that were discarded because their response restarted.", "tokens", source="pool")] = 0
    recomputed_tokens: Annotated[
        int, Metric("Tokens of prefixes that were sent again because a response was interrupted.", "tokens", source="pool")
    ] = 0
    recalled_tokens: Annotated[
        int, Metric("Tokens sampled before a restart and reused by unfinished episodes.", "tokens", source="pool")
    ] = 0
    scoring: Annotated[Mapping[str, Scoring], Metric('Statistics of the stages in use, "scorer" and "teacher".', key="who")] = {}
    tools: Annotated[Mapping[str, Calls], Metric("Statistics of tool calls, by the tool's name.", key="tool")] = {}
    tokens_per_s: Annotated[Amount, Metric("Sampled tokens per second since the last record.", "tokens/s")] = None
    engine_utilization: Annotated[
        Mapping[str, float],
        Metric("Share of the time since the last record in which the engine had work.", "share of time", key="engine"),
    ] = {}
    engines_serving: Annotated[int, Metric("Engines that get requests, at the moment.", "engines")] = 0
    engines_lost: Annotated[int, Metric("Engines that died or were fenced since the controller started.", "engines")] = 0
    engines_missing: Annotated[int, Metric("Lost engines that have not restarted.", "engines")] = 0
    workers_lost: Annotated[int, Metric("Rollout workers that were lost since the controller started.", "workers")] = 0
    workers_missing: Annotated[int, Metric("Lost rollout workers that have not joined again.", "workers")] = 0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one set of questions.

    A number is None (null) if every episode failed; `reward_stderr` also if fewer than two questions have rewards. `pass_at` and
    `pass_at_stderr` omit each k for which there are too few rewards.
    """

    time: Annotated[float, "Unix seconds at the end of the evaluation."]
    version: Annotated[int, Metric("Version that every engine served when the evaluation started.")]
    version_min: Annotated[Count, Metric("Oldest version that sampled a token of the evaluation.")] = None
    version_max: Annotated[
        Count, Metric("Newest version that sampled a token; later than `version` if weights were updated during the evaluation.")
    ] = None
    name: Annotated[str, "Name of the set in `evaluation.sets`; empty without sets."] = ""
    questions: Annotated[int, Metric("Number of questions.")]
    samples: Annotated[int, Metric("Episodes per question, k, failed ones included; `reward_mean` is mean@k.")] = 1
    episodes: Annotated[int, Metric("Episodes.")]
    reward_mean: Annotated[Amount, Metric("Mean over questions of each question's mean reward, without failed episodes.", "reward")] = None
    reward_stderr: Annotated[
        Amount,
        Metric(
            "Standard error of `reward_mean`: the sample standard deviation of the questions' means / sqrt(questions with a reward).",
            "reward",
        ),
    ] = None
    metrics: Annotated[
        Mapping[str, float],
        Metric(
            "Mean of each metric beside the reward, computed as `reward_mean` over the episodes that have it; at most 64 metrics, those "
            "that most episodes have.",
            "the metric's own unit",
            key="name",
        ),
    ] = {}
    pass_at: Annotated[
        Mapping[str, float],
        Metric(
            "pass@k: unbiased estimate of the chance that at least one of k episodes passes (`evaluation.pass_reward`), as a mean over "
            "questions with at least k rewards.",
            "share of questions",
            key="k",
        ),
    ] = {}
    pass_at_stderr: Annotated[
        Mapping[str, float],
        Metric(
            "Standard error of `pass_at`: the sample standard deviation of the questions' pass@k / sqrt(questions with k rewards).",
            "share of questions",
            key="k",
        ),
    ] = {}
    failed: Annotated[Mapping[str, int], Metric("Episodes without a reward, by reason.", "episodes", key="reason")] = {}
    failed_share: Annotated[float, Metric("Failed share of the episodes.", "share of episodes")] = 0.0
    response_tokens_mean: Annotated[Amount, Metric("Mean number of sampled tokens per successful episode.", "tokens")] = None
    truncated_fraction: Annotated[
        Amount, Metric("Share of the successful episodes' responses that ended at their limit of tokens.", "share of responses")
    ] = None
    seconds: Annotated[float, Metric("Duration of the evaluation.", "seconds")]
    skipped: Annotated[int, Metric("Evaluations skipped since the controller started, because another evaluation was running.")] = 0
