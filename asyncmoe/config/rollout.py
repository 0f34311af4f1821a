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
    """Responses to each prompt. Advantages compare their rewards."""
    max_new_tokens: Positive = 16
    """Maximum tokens of a response. Raise it if responses are cut off before their answer."""
    temperature: Annotated[float, Field(ge=1e-6), FINITE, NUMBER] = 1.0
    """Sampling temperature: engine and trainer divide the logits by it. Raise it if the responses to a prompt all get the same reward. """
    top_p: Share = 1.0
    """Sample only from the fewest tokens whose probabilities add up to this; 1: from all. A value below 1 needs top_k, or
    keep.sampling_mask off."""
    top_k: Annotated[int, Field(ge=2), NUMBER] | None = None
    """Sample only from this many of the most probable tokens; null: from all. Unless keep.sampling_mask is off, it must be at most 4096,
    and must be set if top_p or min_p exclude tokens."""
    min_p: Decay = 0.0
    """Do not sample tokens less probable than this share of the most probable token's probability; 0: off. A value above 0 needs top_k, or
    keep.sampling_mask off."""
    max_concurrent: Positive | None = None
    """Maximum requests in flight over all engines; null: engines.count * engines.max_running, which fills all engines. Set it if more
    engines than engines.count may join."""
    order: Order = "fifo"
    """Order of requests that wait because max_concurrent are in flight; those that continue an episode go first. fifo: first come, first
    served; longest_first: first the prompts whose responses have been long so far; probes_first: first one response to each new prompt,
    then the other responses, longest first (for run.mode sync and one_step_off; in async, more groups would be dropped)."""
    request_timeout_s: Seconds = 300.0
    """Seconds an engine may take for a response; a slower response is rejected and its group started over."""
    interruption: Interruption = "in_place"
    """What happens to responses in flight when engines get a new version. in_place: they pause and continue; retract: they pause, and their
    keys and values are recomputed (not with keep.routing); abort_resume: they are aborted, and new requests continue them; abort_retry:
    they start again from the prompt; drain: they finish first, on the old version."""
    filter_equal: bool = False
    """Drop groups whose rewards are all equal, since they carry no advantage, and sample other prompts (DAPO). Not with objective.advantage
    reinforce_plus_plus or gdpo, which give such groups an advantage."""
    max_rejected_share: Share = 0.25
    """The run ends if more than this share of the last 128 groups was rejected and not started over; 1: only if all were rejected. The rule
    applies from the 32nd group on."""

    workers: Positive = 1
    """Rollout workers: processes that run the episodes and hold the trajectories until the trainer has fetched them. Each has at most its
    equal share of max_concurrent requests in flight. One worker keeps up with some dozens of GPUs (benchmarks/README.md)."""
    start_workers: bool = True
    """true: the controller starts the rollout workers on its own machine. false: you start each with `asyncmoe worker CONFIG --number N`, N
    from 1, on any machine with access to the log's folder."""

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
    """Keep routing: record the experts each token went through in the engine; the trainer sends the token through the same experts. auto:
    on if the model has experts."""
    sampling_mask: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Keep the sampling mask: record the ids each token was sampled from; the trainer normalises its probabilities over the same ids. auto:
    on if rollout.top_p, top_k or min_p exclude any ids. Needs rollout.top_k."""
