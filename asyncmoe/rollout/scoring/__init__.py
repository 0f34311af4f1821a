"""Score responses while generation continues.

A scorer is one of
- a function `f(prompt, response, answer)`, which may also take `columns`, the example's other columns: a plain function runs in worker
  processes, a coroutine function in the controller's event loop;
- a class with `score(sample)`, constructed with `scoring.options`; it runs where a function would and may have a `close()`;
- an HTTP endpoint that receives each sample by POST.
It returns a number, or {"reward": number, "steps": [numbers]} (process rewards). A teacher may supply log-probabilities, with or without
a scorer. If scorer or teacher raises, times out, cannot be reached or returns an invalid answer, the response is rejected; each of these
failures has its own reason, and none becomes a reward of zero.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from asyncmoe.config.scoring import ScoringSection, TeacherSection
from asyncmoe.config.task import READ, TaskSection
from asyncmoe.errors import ConfigError
from asyncmoe.rollout.scoring import parse_score, plugin, teacher
from asyncmoe.rollout.scoring.http import HttpJudge
from asyncmoe.rollout.scoring.limits import LimitedScorer, ScoringLimits, Stats
from asyncmoe.rollout.scoring.parse_score import Decode
from asyncmoe.rollout.scoring.teacher import Taught
from asyncmoe.rollout.scoring.types import Judge, Sample, Score, Scorer, Teaches, teaches
from asyncmoe.rollout.scoring.workers import InWorkers

__all__ = [
    "Exact",
    "Sample",
    "Score",
    "Scorer",
    "Stats",
    "Taught",
    "Teaches",
    "load",
    "scorer_kind",
    "stages",
    "stats",
    "teaches",
    "untaught",
    "write_log",
]

MATH_VERIFY = "asyncmoe.rollout.scoring.mathematics:score"
_AT_ONCE = 64
_WORKERS = min(4, os.cpu_count() or 1)


class Exact:
    """Reward 1 if the response, without surrounding white space, equals the answer, else 0."""

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        return Score(float(sample.response.strip() == sample.answer))

    async def close(self) -> None:
        """See `Scorer`."""


def load(section: ScoringSection, task: TaskSection, decode: Decode, seed: int = 0) -> Scorer:
    """Build the scorer that the configuration names.

    Args:
        decode: converts token ids to text, for `step_separator`.
        seed: the run's seed.

    Raises:
        ConfigError: the function or class cannot be loaded or does not accept `scoring.options`, or the teacher's key is missing.
    """
    scorer = _scorer(section, task, decode, seed)
    if section.teacher is None:
        assert scorer is not None
        return scorer
    judge = teacher.TeacherJudge(section.teacher.url, section.teacher.timeout_s, _teacher_key(section.teacher))
    return Taught(scorer, LimitedScorer("the teacher", judge, teacher.read, _limits(section, section.teacher.concurrency), seed))


def _teacher_key(section: TeacherSection) -> str:
    name = section.key_variable
    if name is None:
        return ""
    if not (key := os.environ.get(name, "").strip()):
        why = "is not set" if name not in os.environ else "is empty"
        raise ConfigError("scoring.teacher.key_variable", got=f"{name}, which {why}", expected="a variable with the API key of the teacher")
    return key


def untaught(scorer: Scorer) -> Scorer:
    """Return `scorer` without its teacher. A teacher without a scorer is returned unchanged."""
    return scorer.scorer if isinstance(scorer, Taught) and scorer.scorer is not None else scorer


def stats(scorer: Scorer) -> Mapping[str, Stats]:
    """Return the statistics of each stage of `scorer`, by name: "scorer", "teacher"."""
    return {name: stage.stats() for name, stage in stages(scorer).items()}


def stages(scorer: Scorer) -> Mapping[str, LimitedScorer]:
    """Return the stages of `scorer` that may fail, by name: "scorer", "teacher"."""
    parts = {"scorer": scorer.scorer, "teacher": scorer.teacher} if isinstance(scorer, Taught) else {"scorer": scorer}
    return {name: part for name, part in parts.items() if isinstance(part, LimitedScorer)}


def write_log(scorer: Scorer, run_dir: Path, worker: int = 0) -> None:
    """Write what the user's scorer raised to `asyncmoe.rollout.scoring.tracebacks.LOG`, if it raised anything since the last call.

    Args:
        worker: number of the rollout worker that this process is; 0: none.

    Raises:
        StorageError: it cannot be written.
    """
    for stage in stages(scorer).values():
        stage.tracebacks.write(run_dir, worker)


def scorer_kind(section: ScoringSection, task: TaskSection) -> str:
    """Return `scoring.scorer`, with auto resolved."""
    if section.scorer == "auto":
        return "math_verify" if task.kind in READ else "exact"
    return section.scorer


def _scorer(section: ScoringSection, task: TaskSection, decode: Decode, seed: int) -> Scorer | None:
    kind = scorer_kind(section, task)
    if kind == "none":
        return None
    if kind == "exact":
        return Exact()
    read = parse_score.read_json if kind.startswith(("http://", "https://")) else parse_score.read
    judge = _judge(section, kind)
    made = partial(read, separator=section.step_separator, decode=decode)
    return LimitedScorer("the scorer", judge, made, _limits(section, section.concurrency or judge.width or _AT_ONCE), seed)


def _judge(section: ScoringSection, kind: str) -> Judge:
    if kind.startswith(("http://", "https://")):
        return HttpJudge(kind, section.timeout_s)
    target = MATH_VERIFY if kind == "math_verify" else kind
    found = plugin.find(target)
    if section.options and not found.is_class:
        raise ConfigError(
            "scoring.options",
            got=section.options,
            expected=f"none, because {target} is a function",
            hint="omit them, or write a class that accepts them",
        )
    if found.awaits:
        ask, made = found.ask(section.options)
        return plugin.AsyncScorer(ask, found.function, made, section.timeout_s)
    return InWorkers(target, section.options, found.is_class, section.timeout_s, section.concurrency or _WORKERS)


def _limits(section: ScoringSection, concurrency: int) -> ScoringLimits:
    s = section
    return ScoringLimits(concurrency, s.deadline_s, s.retries, s.backoff_s, s.breaker_failures, s.breaker_cooldown_s)
