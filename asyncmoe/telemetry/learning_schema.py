"""The first fields of a step's record; see `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from asyncmoe.telemetry.metric import Metric, Plot


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """Which step it was, and what it learned from."""

    step: Annotated[int, "Number of optimizer steps taken, including this step and the warm-up."]
    phase: Annotated[Literal["warmup", "rl"], "The supervised warm-up, or reinforcement learning."]
    time: Annotated[float, "Unix seconds at the end of the step."]
    version: Annotated[int | None, Metric("Version of the weights after the step.")] = None
    lineage: Annotated[
        int | None, Metric("Number of restarts so far that trained steps again from the log: a step of another lineage has other weights.")
    ] = None

    # Learning
    reward_mean: Annotated[
        float | None, Metric("Mean reward of the batch.", "reward", word="reward", plot=Plot("Learning", "Mean reward"))
    ] = None
    reward_std: Annotated[
        float | None, Metric("Standard deviation of the batch's rewards.", "reward", plot=Plot("Learning", "Reward spread", from_zero=True))
    ] = None
    rewards: Annotated[
        Mapping[float, int] | None,
        Metric(
            "Number of the batch's responses by reward, rounded to at most 20 steps of 1, 2 or 5 times a power of ten from the least to "
            "the greatest.",
            "responses",
            key="reward",
            plot=Plot("Learning", "Distribution of rewards", heat="share"),
        ),
    ] = None
    step_reward_mean: Annotated[
        float | None,
        Metric("Mean reward of the rewarded steps of the batch's responses.", "reward", plot=Plot("Learning", "Mean reward of steps")),
    ] = None
    loss: Annotated[float | None, Metric("Loss.", "loss", word="loss", plot=Plot("Learning", "Policy loss"))] = None
    grad_norm: Annotated[float | None, Metric("Gradient norm before clipping.", "norm", plot=Plot("Learning", "Gradient norm"))] = None
    lr: Annotated[float | None, Metric("Learning rate.", "a step", plot=Plot("Learning", "Learning rate", from_zero=True))] = None
    entropy: Annotated[
        float | None,
        Metric(
            "Entropy of the trainer's distribution over the whole vocabulary, per sampled token.",
            "nats a token",
            plot=Plot("Learning", "Entropy"),
        ),
    ] = None
    clip_fraction: Annotated[
        float | None,
        Metric(
            "Share of the trained sampled tokens on which the clip acts.",
            "share of tokens",
            plot=Plot("Learning", "Clipped tokens", from_zero=True),
        ),
    ] = None
    response_tokens_mean: Annotated[
        float | None,
        Metric(
            "Mean number of sampled tokens per response.", "tokens", plot=Plot("Learning", "Response length", curve="mean", from_zero=True)
        ),
    ] = None
    response_tokens_quantiles: Annotated[
        Mapping[str, float] | None,
        Metric(
            "Quantiles of the number of sampled tokens per response, by share.",
            "tokens",
            key="quantile",
            plot=Plot("Learning", "Response length", curve="quantile", from_zero=True),
        ),
    ] = None
    truncated_fraction: Annotated[
        float | None,
        Metric(
            "Share of the responses that ended at their limit of tokens.",
            "share of responses",
            plot=Plot("Learning", "Truncated responses", from_zero=True),
        ),
    ] = None
