"""The task that prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import Positive, Section


class TaskSection(Section):
    """Source of the questions and their reference answers."""

    kind: Literal["arithmetic", "jsonl"] = Field(
        description="arithmetic: random calculations, without end; jsonl: the questions of a file (`path`)."
    )
    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+",), description="arithmetic: operators to draw from.")
    difficulty: Positive = Field(1, description="arithmetic: decimal digits of each operand.")
    path: Path | None = Field(None, description='jsonl: file with one {"question": ..., "answer": ...} per line, as in GSM8K.')
    chat_template: bool = Field(
        True, description="jsonl: apply the tokenizer's chat template to the question; false for a base model without one."
    )

    @model_validator(mode="after")
    def _check(self) -> TaskSection:
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path: got nothing, expected the path of a JSONL file because task.kind is jsonl")
        if not self.operations:
            raise ValueError("task.operations: got an empty list, expected at least one of + - *")
        return self
