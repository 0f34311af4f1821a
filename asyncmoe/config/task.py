"""The task that prompts come from: its kind, its sources, and the columns of their rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from asyncmoe import plugins
from asyncmoe.config.fields import NameOrPlugin, Positive, PositiveFloat, Section, filled, refused

KINDS = ("arithmetic", "jsonl", "dataset")
READ = ("jsonl", "dataset")
"""Kinds that read rows from files or data sets."""
Kind = Annotated[str, NameOrPlugin(KINDS)]
_OF_ROWS = ("path", "subset", "split", "where", "filter", "columns")


def _plain(where: dict[str, Any]) -> dict[str, Any]:
    for name, value in where.items():
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, str | int | float | bool | None):
                raise PydanticCustomError("where", f"Input should be a text, a number or a list of these for {name}")
        if value == []:
            raise PydanticCustomError("where", f"Input should be at least one value for {name}")
    return where


class ColumnsSection(Section):
    """Names of the columns of a row; a name with dots, such as reward_model.ground_truth, reaches into nested values."""

    question: str = "question"
    """Column of the question: text, or a list of messages with role and content."""
    answer: str | None = "answer"
    """Column of the answer: text or a number; of a text with ####, only the part after the last #### counts. null: no answers."""
    keep: tuple[str, ...] | None = None
    """Columns besides question and answer that scorers and environments receive; null: all. Their values must fit into JSON."""


class SourceSection(Section):
    """Where a task of kind jsonl or dataset gets its rows."""

    path: Path | None = None
    """Kind jsonl: a file with a JSON object per line. Kind dataset: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a directory, or
    the id of a data set on the Hugging Face hub."""
    subset: str | None = None
    """Kind dataset: configuration of a data set on the hub, for example main."""
    split: str | None = None
    """Kind dataset: split, for example test; null: train."""
    where: Annotated[dict[str, Any], AfterValidator(_plain)] | None = None
    """Rows to keep, as {column: value}; a list of values means any of them."""
    filter: Annotated[str, NameOrPlugin(())] | None = None
    """Your own function that returns whether to keep a row, as package.module:function."""
    columns: ColumnsSection | None = None


class WeightedSource(SourceSection):
    """A list of the sources of a mixture, each with these keys. A key left null is taken from `task`."""

    weight: PositiveFloat = 1.0
    """Share of this source in the prompts, relative to the weights of the other sources."""


class TaskSection(SourceSection):
    """Source of the questions and their reference answers."""

    kind: Kind
    """arithmetic: an endless series of random calculations; jsonl: questions from a JSONL file; dataset: questions from other files or a
    data set; or your own class (docs/guides/task.md)."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of your own class."""
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",)
    """Kind arithmetic: operators to draw from."""
    difficulty: Positive = 1
    """Kind arithmetic: decimal digits of each operand."""
    sources: tuple[WeightedSource, ...] = Field(())
    chat_template: bool = True
    """Apply the tokenizer's chat template to questions that are text, except with kind arithmetic. Set false for a base model that has no
    template."""
    system_prompt: str | None = None
    """System message for every conversation that has none."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables of the chat template, such as {enable_thinking: false}."""

    @property
    def chats(self) -> bool:
        """True if questions become conversations."""
        return self.kind != "arithmetic" and self.chat_template

    @property
    def mixture(self) -> tuple[WeightedSource, ...]:
        """The sources with their defaults filled in; one source if there are no `sources`."""
        return tuple(filled(one, self, _OF_ROWS) for one in self.sources or (WeightedSource(),))

    @model_validator(mode="after")
    def _check(self) -> TaskSection:
        if self.kind in READ and any(one.path is None for one in self.mixture):
            key = "task.sources" if self.sources else "task.path"
            raise refused(key, "nothing", f"the path of a {_WANTED[self.kind]} because task.kind is {self.kind}")
        if math.isinf(sum(one.weight for one in self.sources)):
            raise refused("task.sources", "weights whose sum is not finite", "smaller weights; only their ratios count")
        if self.kind != "arithmetic":
            for name in ("operations", "difficulty"):
                if getattr(self, name) != type(self).model_fields[name].default:  # `asyncmoe config show` writes the defaults out
                    raise refused(f"task.{name}", _said(getattr(self, name)), f"none because task.kind is {self.kind}; leave it out")
        if not self.operations:
            raise refused("task.operations", "an empty list", "at least one of + - *")
        for name, allowed in self._allowed().items():
            value = getattr(self, name)
            if value not in (None, (), {}) and not allowed:
                got = value if isinstance(value, str | dict | bool | Path) else "a value"
                raise refused(f"task.{name}", got, f"none because task.kind is {self.kind}; leave it out")
        if self.kind == "jsonl" and any(one.subset or one.split for one in self.mixture):
            raise refused("task.kind", "jsonl", "dataset because a subset or a split is given; change the kind, or leave them out")
        if self.system_prompt is not None and not self.chats:
            expected = "null because task.chat_template is false; set that to true, or write the text into the questions"
            raise refused("task.system_prompt", f"{self.system_prompt!r}", expected)
        return self

    def _allowed(self) -> dict[str, bool]:
        """Return, for each key that only some kinds have, whether this kind has it."""
        rows, own, chats = self.kind in READ, plugins.is_name(self.kind), self.kind != "arithmetic"
        # A path is allowed with any kind, so that overriding the kind alone is enough to try a configuration.
        return {**dict.fromkeys(("sources", *_OF_ROWS[1:]), rows), "options": own, "system_prompt": chats, "chat_template_kwargs": chats}


def _said(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_WANTED = {"jsonl": "JSONL file", "dataset": "data set"}
