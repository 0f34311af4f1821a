"""Evaluation of the policy during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, NonNegativeFloat, Positive, Real, Section, Share, filled, refused
from asyncmoe.config.task import READ, Kind, SourceSection, TaskSection

_SAMPLED = ("prompts", "samples", "temperature", "top_p", "max_new_tokens")


class EvaluationSet(SourceSection):
    """A mapping from names to sets of questions, each with these keys; sets are evaluated and recorded separately. A set without a source
    asks questions held out from the task; a set with a subset or split but no path reads the task's path. The keys prompts, samples,
    temperature, top_p and max_new_tokens default to their values in `evaluation`."""

    kind: Kind | None = None
    """As task.kind, for the set; null: dataset if task.kind is dataset, or if the set has a subset or split; else jsonl."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of your own class."""
    prompts: Positive | None = None
    """Maximum questions."""
    samples: Positive | None = None
    """Episodes per question: the largest k of pass@k."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0: always the most probable token."""
    top_p: Share | None = None
    """As rollout.top_p."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of a response."""

    @property
    def held_out(self) -> bool:
        """True if the set has no source of its own."""
        return self.kind is None and self.path is None and self.subset is None and self.split is None

    def task(self, training: TaskSection) -> TaskSection:
        """Return the set's own source as a task. Raises ValueError if it is invalid."""
        if self.kind is not None:
            kind = self.kind
        else:
            kind = "dataset" if training.kind == "dataset" or self.subset is not None or self.split is not None else "jsonl"
        same = self.path is None
        drawn: dict[str, Any] = training.model_dump(include={"operations", "difficulty"}) if kind == "arithmetic" else {}
        return TaskSection(
            kind=kind,
            options=self.options,
            path=training.path if same and kind in READ else self.path,
            subset=training.subset if same and self.subset is None and kind == "dataset" else self.subset,
            split=training.split if same and self.split is None and kind == "dataset" else self.split,
            where=self.where,
            filter=self.filter,
            columns=self.columns or (training.columns if kind in READ else None),
            **drawn,
            chat_template=training.chat_template,
            system_prompt=None if kind == "arithmetic" else training.system_prompt,
        )


class EvaluationSection(Section):
    """Ask every n-th version, and the last, the same questions, on the run's own engines. Training does not wait for the answers."""

    every: NonNegative = 0
    """Versions between evaluations, the first at the end of the warm-up; the last step's version is also evaluated, before the run ends. 0:
    no evaluation at all."""
    prompts: Positive = 64
    """Maximum questions of an evaluation, the same ones each time."""
    samples: Positive = 1
    """Episodes per question; more give a less noisy mean, and pass@k for every k up to this number."""
    path: Path | None = None
    """Source of evaluation questions, in the format of task.path; training leaves out prompts that equal an evaluation question, apart from
    white space and system messages. null: questions held out from training; for an endless task (arithmetic) they are drawn separately, and
    may coincide with training questions."""
    sets: dict[str, EvaluationSet] = Field({})
    pass_reward: Real = 1.0
    """Lowest reward with which an episode passes, for pass@k."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0: always the most probable token; null: rollout.temperature."""
    top_p: Share | None = None
    """As rollout.top_p, for evaluation; null: rollout.top_p."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of a response; null: rollout.max_new_tokens."""
    max_concurrent: Positive | None = None
    """Maximum evaluation episodes in flight; null: an eighth of rollout.max_concurrent."""

    @property
    def every_set(self) -> dict[str, EvaluationSet]:
        """The sets by name, with their defaults filled in; one without a name if there are no `sets`."""
        sets = self.sets or {"": EvaluationSet(path=self.path)}
        return {name: filled(one, self, _SAMPLED) for name, one in sets.items()}

    @model_validator(mode="after")
    def _check(self) -> EvaluationSection:
        if self.sets and self.path is not None:
            raise refused("evaluation.path", self.path, "null because there are evaluation.sets; make the path one of the sets")
        for name, one in self.sets.items():
            key = f"evaluation.sets.{name}"
            if not name.replace("-", "_").replace(".", "_").isidentifier() and not name.isalnum():
                raise refused("evaluation.sets", f"the name {name!r}", "letters, digits, '_', '-' and '.'")
            if one.held_out and (one.where or one.filter or one.columns or one.options):
                raise refused(f"{key}.path", "nothing", "a path, because where, filter, columns and options describe the set's own source")
        return self
