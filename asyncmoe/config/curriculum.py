"""How often each prompt is drawn again, by the pass rate that its own groups measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from asyncmoe.config.fields import FINITE, NUMBER, Real, Section, Share


class CurriculumSection(Section):
    """Draw prompts by measured difficulty; for jsonl, dataset and your own class with a length, without streaming. Evaluation asks its
    questions as without it."""

    enabled: bool = Field(
        False,
        description="Pass over prompts whose groups all pass or all fail more often than others, instead of asking each once in an epoch.",
    )
    floor: Share = Field(0.1, description="Smallest chance that a prompt is asked when its turn comes; 1: every time, only measure.")
    memory: Annotated[float, Field(ge=0, le=1), FINITE, NUMBER] = Field(
        0.8, description="Weight of a prompt's earlier groups at each new one, because the policy changes; 0: only the last counts."
    )
    pass_reward: Real = Field(1.0, description="Reward from which a response passes.")
