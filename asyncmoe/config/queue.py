"""The bounded queue and its staleness rules."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from asyncmoe.config.fields import NonNegative, Positive, Seconds, Section, Share, refused

StalenessRule = Literal["drop", "requeue", "downweight"]


class StalenessSection(Section):
    """Staleness: how many versions a trained token may be behind the trainer."""

    max_staleness: NonNegative = 1
    """Versions a trained token may be behind the trainer (eta in AReaL's paper). Capacity law: a group starts only while accepted + running
    trajectories < (max_staleness + version + 1) * trajectories per step. Raise it if engines and trainer wait for each other; lower it if
    too many ratios are clipped."""
    rule: StalenessRule = "drop"
    """What happens to a group whose oldest token is more than max_staleness versions old when its turn to train comes. drop: the group is
    discarded. requeue: its prompt is sampled again. downweight: the group is trained with less weight, or discarded if it is older than
    drop_above."""
    downweight: Share | None = None
    """With rule downweight: factor on a group's weight for each version beyond max_staleness."""
    drop_above: Positive | None = None
    """With rule downweight: drop a group with a token older than this many versions."""

    @model_validator(mode="after")
    def _check(self) -> StalenessSection:
        above = f"a number above queue.staleness.max_staleness = {self.max_staleness}"
        for name, value, what in (("downweight", self.downweight, "a factor of at most 1"), ("drop_above", self.drop_above, above)):
            if self.rule == "downweight" and value is None:
                raise refused(f"queue.staleness.{name}", "nothing", f"{what} because queue.staleness.rule is downweight")
            if self.rule != "downweight" and value is not None:
                expected = f"nothing because queue.staleness.rule is {self.rule}; leave it out, or set the rule to downweight"
                raise refused(f"queue.staleness.{name}", value, expected)
        if self.drop_above is not None and self.drop_above <= self.max_staleness:
            expected = f"more than queue.staleness.max_staleness = {self.max_staleness}; raise it, or set queue.staleness.rule to drop"
            raise refused("queue.staleness.drop_above", self.drop_above, expected)
        return self


class QueueSection(Section):
    """The bounded queue between engines and trainer."""

    staleness: StalenessSection = StalenessSection()
    capacity: Positive | None = None
    """Maximum trajectories in the queue; further ones wait. null: the trajectories of max_staleness + 1 steps. Lower it to save memory."""
    lease_timeout_s: Seconds = 600.0
    """Seconds the trainer waits for a batch before the run fails. Raise it if responses are long."""
