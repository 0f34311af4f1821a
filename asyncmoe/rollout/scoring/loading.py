"""Build the scorer and the teacher that a configuration names."""

from __future__ import annotations

import inspect
import os
from functools import partial

from asyncmoe.config.scoring import ScoringSection, TeacherSection
from asyncmoe.config.task import READ, TaskSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.scoring import http, parse_score, plugin, teacher
from asyncmoe.rollout.scoring.exact import Exact, Unscored
from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.scoring.parse_score import Decode
from asyncmoe.rollout.scoring.types import Judge, Scorer
from asyncmoe.rollout.scoring.workers import InWorkers

MATH_VERIFY = "asyncmoe.rollout.scoring.mathematics:score"
_AT_ONCE = 64
_WORKERS = min(4, os.cpu_count() or 1)


def load(section: ScoringSection, task: TaskSection, decode: Decode, seed: int = 0) -> Scorer:
    """Build the scorer that the configuration names.

    Args:
        decode: converts token ids to text, for `step_separator`.
        seed: the run's seed.

    Raises:
        ConfigError: the function or class cannot be loaded or does not accept `scoring.options`.
    """
    kind = scorer_kind(section, task)
    if kind in ("exact", "none"):
        return Exact() if kind == "exact" else Unscored()
    read = parse_score.read_json if kind.startswith(("http://", "https://")) else parse_score.read
    judge = _judge(section, kind)
    made = partial(read, separator=section.step_separator, decode=decode)
    concurrency = section.concurrency or (_WORKERS if isinstance(judge, InWorkers) else _AT_ONCE)
    return LimitedScorer("the scorer", judge, made, concurrency, section, seed)


def load_teacher(section: ScoringSection, seed: int = 0) -> Scorer | None:
    """Return the teacher as a scorer without rewards; None without a teacher. Raises ConfigError if its key is missing."""
    if (given := section.teacher) is None:
        return None
    poster = http.Poster(f"{given.url.rstrip('/')}/generate", given.timeout_s, _teacher_key(given))
    return LimitedScorer("the teacher", http.HttpJudge(poster, teacher.asked), teacher.read, given.concurrency, section, seed)


def _teacher_key(section: TeacherSection) -> str:
    name = section.key_variable
    if name is None:
        return ""
    if not (key := os.environ.get(name, "").strip()):
        why = "is not set" if name not in os.environ else "is empty"
        raise ConfigError("scoring.teacher.key_variable", got=f"{name}, which {why}", expected="a variable with the API key of the teacher")
    return key


def scorer_kind(section: ScoringSection, task: TaskSection) -> str:
    """Return `scoring.scorer`, with auto resolved."""
    if section.scorer == "auto":
        return "math_verify" if task.kind in READ else "exact"
    return section.scorer


def _judge(section: ScoringSection, kind: str) -> Judge:
    if kind.startswith(("http://", "https://")):
        return http.HttpJudge(http.Poster(kind, section.timeout_s), http.asked)
    target = MATH_VERIFY if kind == "math_verify" else kind
    found = plugin.find(target)
    if section.options and not found.is_class:
        raise ConfigError(
            "scoring.options",
            got=section.options,
            expected=f"none, because {target} is a function",
            hint="omit them, or write a class that accepts them",
        )
    if inspect.iscoroutinefunction(found.function):
        ask, made = found.ask(section.options)
        return plugin.AsyncScorer(ask, found.function, made, section.timeout_s)
    return InWorkers(target, section.options, found.is_class, section.timeout_s, section.concurrency or _WORKERS)
