"""Configuration of scoring."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, Positive, Seconds, Section, refused

_FAILURES = frozenset({"scorer_error", "scorer_nan", "scorer_timeout", "scorer_garbage", "scorer_unavailable"})
_WITHOUT_STEPS = ("exact", "math_verify", "none")


class TeacherSection(Section):
    """A second SGLang server whose log-probabilities of the sampled tokens are added to each trajectory (on-policy distillation)."""

    url: str
    """Address of the teacher, http://host:port; its model must have the policy's tokenizer."""
    key_variable: str | None = None
    """Environment variable of the rollout workers that holds the API key of the teacher's server; null: no key."""
    timeout_s: Seconds = 60.0
    """Seconds one call may take."""
    concurrency: Positive = 16
    """Maximum calls in flight."""

    @model_validator(mode="after")
    def _check(self) -> TeacherSection:
        _refuse_address("scoring.teacher.url", self.url)
        return self


class ScoringSection(Section):
    """The scorer, its limits, and what happens when it fails. A response that cannot be scored is rejected, never scored 0."""

    scorer: str = "auto"
    """auto (math_verify for task.kind jsonl and dataset, exact for arithmetic), exact, math_verify, your own function as
    package.module:function, your own class as package.module:Class, an endpoint as http://host:port/path, or none: learn from the teacher
    only."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of a scorer class."""
    teacher: TeacherSection | None = None
    step_separator: str | None = Field(None, min_length=1)
    """Text between two steps, for a scorer that scores steps; null: each response of a conversation is one step."""
    concurrency: Positive | None = None
    """Maximum calls in flight. A function or class that is not async runs in this many processes. null: for such a scorer the number of
    cores, at most 4; for all others 64. Raise it if responses wait for their turn."""
    timeout_s: Seconds = 10.0
    """Seconds one call may take."""
    deadline_s: Seconds = 600.0
    """Seconds the scoring of one response may take, including all waiting and retries."""
    retries: NonNegative = 2
    """Retries of a call that raised or timed out. A call that cannot connect is retried until the deadline instead. 0: no call is retried
    at all."""
    try_first: bool = True
    """Before engines start, score the reference answer of the first prompt with the scorer and the teacher; the run ends if that fails. Set
    false for an endpoint that is not ready by then."""
    on_failure: Literal["drop", "requeue"] = "drop"
    """What happens to a group with a response that cannot be scored. drop: the group is rejected. requeue: its prompt is sampled again, up
    to 3 attempts in all."""

    @property
    def start_over(self) -> frozenset[str]:
        """Rejection reasons after which a group is started over."""
        return _FAILURES if self.on_failure == "requeue" else frozenset()

    @property
    def may_score_steps(self) -> bool:
        """True if the scorer's results may contain step scores."""
        return self.scorer not in ("auto", *_WITHOUT_STEPS)

    @model_validator(mode="after")
    def _check(self) -> ScoringSection:
        if self.scorer.startswith(("http:", "https:")):
            _refuse_address("scoring.scorer", self.scorer)
        if self.scorer == "none" and self.teacher is None:
            raise refused("scoring.scorer", "none", "a scorer because there is no scoring.teacher either; name a scorer or a teacher")
        if self.options and ":" not in self.scorer:
            raise refused("scoring.options", self.options, f"none because scoring.scorer is {self.scorer}; leave them out, or name a class")
        if self.options and self.scorer.startswith(("http:", "https:")):
            expected = "none because scoring.scorer is an endpoint; leave them out, or put them into its address"
            raise refused("scoring.options", self.options, expected)
        if self.step_separator is not None and self.scorer in _WITHOUT_STEPS:
            expected = f"null because scoring.scorer {self.scorer} does not score steps; leave it out"
            raise refused("scoring.step_separator", f"{self.step_separator!r}", expected)
        for key, call_s in (("timeout_s", self.timeout_s), ("teacher.timeout_s", self.teacher.timeout_s if self.teacher else 0.0)):
            if self.deadline_s < call_s:
                expected = f"at least scoring.{key} = {call_s:g}, because the deadline covers all calls and all waiting"
                raise refused("scoring.deadline_s", f"{self.deadline_s:g}", expected, "raise it, or lower the time-out")
        return self


def _refuse_address(key: str, url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/") or any(c.isspace() for c in url):
        raise refused(key, f"{url!r}", "an address like http://host:port")
