"""How responses are sampled, how requests are spread over engines, and what engines record about sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncmoe.config.fields import FINITE, NUMBER, Decay, Positive, Seconds, Section, Share, Switch

Interruption = Literal["in_place", "retract", "abort_resume", "abort_retry", "drain"]
Order = Literal["fifo", "longest_first", "probes_first"]


class RolloutSection(Section):
    """How responses are sampled."""

    groups_per_step: Positive = 16
    """Prompts per training step. The batch is groups_per_step * group_size responses."""
    group_size: Annotated[int, Field(ge=2), NUMBER] = 8
    """Responses to each prompt, whose rewards are compared with each other; at least 2."""
    max_new_tokens: Positive = 16
    """Maximum tokens of a response. Raise it if responses are cut off before their answer."""
    temperature: Annotated[float, Field(ge=1e-6), FINITE, NUMBER] = 1.0
    """Sampling temperature: engine and trainer divide the logits by it. Raise it if the responses to a prompt all get the same reward.
    Below 1e-6 engines take the most probable token and record its log-probability at temperature 1."""
    top_p: Share = 1.0
    """Sample only from the fewest tokens whose probabilities add up to this; 1: from all. Below 1 it needs top_k, or keep.sampling_mask
    off."""
    top_k: Annotated[int, Field(ge=2), NUMBER] | None = None
    """Sample only from this many most probable tokens, at least 2, as 1 leaves nothing to learn; null: from all. Unless keep.sampling_mask
    is off, it must be at most 4096, and it must be set if top_p or min_p exclude tokens."""
    min_p: Decay = 0.0
    """Do not sample tokens less probable than this share of the most probable token's probability; 0: off. Above 0 it needs top_k, or
    keep.sampling_mask off."""
    max_concurrent: Positive | None = None
    """Maximum requests in flight over all engines; null: engines.count * engines.max_running, which fills them. Set it if more engines may
    join than engines.count."""
    order: Order = "fifo"
    """Which request goes next once max_concurrent are in flight; a request that continues an episode precedes a new one. fifo: first
    come, first served; longest_first: prompts whose responses have been long so far; probes_first: one response to each new prompt, then
    the other responses, starting with prompts whose responses were long (for run.mode sync and one_step_off; in async more groups are
    dropped)."""
    request_timeout_s: Seconds = 300.0
    """Seconds an engine may take for a response; a slower response is rejected and its group started over."""
    interruption: Interruption = "in_place"
    """What happens to responses in flight when a version lands. in_place: they pause and continue; retract: they pause, and their keys
    and values are recomputed (not with keep.routing); abort_resume: they are aborted and sent again as prefixes; abort_retry: they start
    again from the prompt; drain: they finish before the version lands."""
    filter_equal: bool = False
    """Drop groups whose rewards are all equal, since they carry no advantage, and sample other prompts (DAPO). Not with objective.advantage
    reinforce_plus_plus or gdpo, which give such groups an advantage."""
    max_rejected_share: Share = 0.25
    """The run ends if more than this share of the last 128 groups (or of fewer, but at least 32) was rejected and not started over, because
    the remaining groups are a biased sample; 1: only if all were rejected."""

    workers: Positive = 1
    """Rollout workers: processes that run the episodes, each with its share of max_concurrent over all engines, and hold the trajectories
    until the trainer has fetched them. One worker keeps up with some dozens of GPUs (benchmarks/README.md); raise the number for more
    GPUs."""
    start_workers: bool = True
    """The controller starts the rollout workers beside itself. false: each is started with `asyncmoe worker CONFIG --number 1` (and so on)
    on its own machine, where it needs the log's folder."""

    @property
    def batch(self) -> int:
        """Trajectories in a training step."""
        return self.groups_per_step * self.group_size

    @property
    def truncated(self) -> bool:
        """True if top_p, top_k or min_p keep some tokens from being sampled."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


class KeepSection(Section):
    """What engines record about the sampling of each token, so that the trainer reproduces it exactly."""

    routing: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Keep routing: record the experts each token went through in the engine; the trainer sends it through the same experts. auto: on if
    the model has experts."""
    sampling_mask: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Keep the sampling mask: record the ids each token was sampled from; the trainer normalises its probabilities over the same ids. auto:
    on if rollout.top_p, top_k or min_p exclude any ids. Needs rollout.top_k."""
