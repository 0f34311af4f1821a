"""Evaluation of the policy during training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from asyncmoe.config.fields import NonNegative, NonNegativeFloat, Positive, Real, Section, Share


class EvaluationSection(Section):
    """Ask the same questions of every n-th version on the same engines. Training does not wait for the answers."""

    every: NonNegative = Field(
        0,
        description="Versions between evaluations; 0: never. The version at the end of the warm-up is the first one evaluated. An "
        "evaluation that still runs when the trainer finishes is abandoned.",
    )
    prompts: Positive = Field(64, description="Questions of an evaluation, the same ones each time.")
    samples: Positive = Field(1, description="Episodes per question; more give a less noisy mean.")
    path: Path | None = Field(
        None,
        description="File of evaluation questions, in the format of task.path. null: questions of the task, drawn separately from the "
        "training questions; for a jsonl task these are lines of the training file.",
    )
    temperature: NonNegativeFloat | None = Field(
        None, description="Sampling temperature; 0: always the most probable token; null: rollout.temperature."
    )
    top_p: Share | None = Field(None, description="As rollout.top_p, for evaluation; null: rollout.top_p.")
    top_k: Positive | None = Field(None, description="As rollout.top_k, for evaluation; null: rollout.top_k.")
    min_p: Annotated[Real, Field(ge=0, lt=1)] | None = Field(None, description="As rollout.min_p, for evaluation; null: rollout.min_p.")
    max_new_tokens: Positive | None = Field(None, description="Maximum tokens of a response; null: rollout.max_new_tokens.")
    max_concurrent: Positive | None = Field(
        None, description="Evaluation episodes in flight, as a part of rollout.max_concurrent; null: an eighth of it."
    )
