"""How responses are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

_FAILURES = frozenset({"scorer_error", "scorer_nan", "scorer_timeout", "scorer_garbage", "scorer_unavailable"})
_WITHOUT_STEPS = ("exact", "math_verify", "none")


class TeacherSection(Section):
    """A second SGLang server, whose log-probabilities of what the policy sampled go with each trajectory (on-policy distillation)."""

    url: str = Field(description="http://host:port; its model must have the policy's tokenizer.")
    timeout_s: PositiveFloat = Field(60.0, description="How long one call may take.")
    concurrency: Positive = Field(16, description="Calls under way at once.")

    @model_validator(mode="after")
    def _check(self) -> TeacherSection:
        _refuse_address("scoring.teacher.url", self.url)
        return self


class ScoringSection(Section):
    """Who scores, and what may go wrong. A response that cannot be scored is rejected, never scored 0."""

    scorer: str = Field(
        "auto",
        description="auto (exact for arithmetic, math_verify for jsonl), exact, math_verify, a function as package.module:function, a "
        "class as package.module:Class, an endpoint as http://host:port/path; none: only the teacher speaks.",
    )
    options: dict[str, Any] = Field({}, description="A class: keyword arguments it is made with.")
    teacher: TeacherSection | None = None
    step_separator: str | None = Field(
        None, description="Where a scorer scores steps: text between two of them; default: each response of a conversation is one step."
    )
    concurrency: Positive | None = Field(
        None,
        description="Calls under way at once; default: 64, or for a plain function or class, which has as many processes, 4 or the "
        "number of cores.",
    )
    timeout_s: PositiveFloat = Field(10.0, description="How long one call may take.")
    deadline_s: PositiveFloat = Field(600.0, description="How long one response may take, with all waiting and all calls.")
    retries: NonNegative = Field(2, description="Further calls after one that raised, took too long or reached nobody.")
    backoff_s: NonNegativeFloat = Field(0.5, description="Pause before the first further call; doubles with each.")
    breaker_failures: Positive = Field(16, description="So many calls in a row took too long or reached nobody: none is made ...")
    breaker_cooldown_s: PositiveFloat = Field(10.0, description="... for so long; then one is, to see.")
    on_failure: Literal["drop", "requeue"] = Field(
        "drop",
        description="What becomes of a group in which a response cannot be scored. requeue: its prompt is answered again, up to 3 times.",
    )

    @property
    def start_over(self) -> frozenset[str]:
        """Reasons after which a group is started over."""
        return _FAILURES if self.on_failure == "requeue" else frozenset()

    @property
    def may_score_steps(self) -> bool:
        """Its answers may hold the scores of steps."""
        return self.scorer not in ("auto", *_WITHOUT_STEPS)

    @model_validator(mode="after")
    def _check(self) -> ScoringSection:
        if self.scorer.startswith(("http:", "https:")):
            _refuse_address("scoring.scorer", self.scorer)
        if self.scorer == "none" and self.teacher is None:
            raise ValueError(
                "scoring.scorer: got none, expected a scorer because there is no scoring.teacher either; name a scorer or a teacher"
            )
        if self.options and ":" not in self.scorer:
            raise ValueError(
                f"scoring.options: got {self.options}, expected none because scoring.scorer is {self.scorer}; leave them out, "
                "or name a class"
            )
        if self.options and self.scorer.startswith(("http:", "https:")):
            raise ValueError(
                f"scoring.options: got {self.options}, expected none because scoring.scorer is an endpoint; leave them out, or put "
                "them into its address"
            )
        if self.step_separator == "":
            raise ValueError("scoring.step_separator: got an empty text, expected some text, or null: each response is one step")
        if self.step_separator is not None and self.scorer in _WITHOUT_STEPS:
            raise ValueError(
                f"scoring.step_separator: got {self.step_separator!r}, expected null because scoring.scorer {self.scorer} does not score "
                "steps; leave it out"
            )
        if self.deadline_s < self.timeout_s:
            raise ValueError(
                f"scoring.deadline_s: got {self.deadline_s:g}, expected at least scoring.timeout_s = {self.timeout_s:g}, because all calls "
                "and all waiting are within it; raise it, or lower the time-out"
            )
        if self.teacher is not None and self.deadline_s < self.teacher.timeout_s:
            raise ValueError(
                f"scoring.deadline_s: got {self.deadline_s:g}, expected at least scoring.teacher.timeout_s = {self.teacher.timeout_s:g}, "
                "because all calls and all waiting are within it; raise it, or lower the time-out"
            )
        return self


def _refuse_address(key: str, url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/") or any(c.isspace() for c in url):
        raise ValueError(f"{key}: got {url!r}, expected an address like http://host:port")
