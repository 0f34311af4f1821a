"""How the policy is measured while it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from asyncmoe.config.fields import NonNegative, NonNegativeFloat, Positive, Real, Section, Share


class EvaluationSection(Section):
    """The same questions to every so many versions, beside the training, which does not wait for the answers."""

    every: NonNegative = Field(
        0,
        description="Versions between two evaluations, counted from the end of the warm-up, which is evaluated too; 0: none. One that "
        "still runs when the trainer has finished is given up.",
    )
    prompts: Positive = Field(64, description="Questions; the same ones every time.")
    samples: Positive = Field(1, description="Episodes to each question.")
    path: Path | None = Field(
        None,
        description="File of questions of its own, in the format of task.path. null: questions of the task, drawn apart from those it is "
        "trained on; of a jsonl task they are lines of the same file.",
    )
    temperature: NonNegativeFloat | None = Field(None, description="0: always the most probable token; null: rollout.temperature.")
    top_p: Share | None = Field(None, description="null: rollout.top_p.")
    top_k: Positive | None = Field(None, description="null: rollout.top_k.")
    min_p: Annotated[Real, Field(ge=0, lt=1)] | None = Field(None, description="null: rollout.min_p.")
    max_new_tokens: Positive | None = Field(None, description="Of a response; null: rollout.max_new_tokens.")
    max_concurrent: Positive | None = Field(
        None, description="Its episodes in flight, among rollout.max_concurrent; null: an eighth of those."
    )
