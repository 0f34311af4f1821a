"""Checks before engines start: the scorer scores, and reference answers equal themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError, TrajectoryRejected
from asyncmoe.rollout.scoring import mathematics
from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.scoring.loading import scorer_kind
from asyncmoe.rollout.scoring.types import TIMEOUT, UNAVAILABLE, Sample, Scorer, ScorerRaised
from asyncmoe.rollout.tasks import Example, HasGolds, Tasks

log = logging.getLogger(__name__)
_SCORED = ("single_turn", "tools")
"""Kinds of environments that leave the reward to the scorer."""
_CHECKED = 2000
"""Number of distinct answers of a source to check, because a check takes milliseconds."""
_SHOWN_CHARS = 60


async def before_engines(config: Config, tasks: Tasks, scorer: Scorer, teacher: Scorer | None) -> None:
    """Check the reference answers, and try the scorer and the teacher with the first prompt.

    An environment of the user's own may give the rewards itself, so with one `scoring.scorer: auto` is not checked.

    Raises:
        DataError: an answer does not equal itself.
        ConfigError: scorer or teacher does not return a score, or the scorer compares with an answer that the first prompt does not have;
            or gdpo weighs a metric that the scorer's metrics lack.
    """
    section = config.scoring
    kind = scorer_kind(section, config.task)
    asked = section.scorer != "auto" or config.environment.kind in _SCORED
    if asked and kind == "math_verify":
        own = [one for one in tasks.sets if one.task is not tasks.training]
        own_sets = {f"evaluation.sets.{one.name}" if one.name else "evaluation.path": one.task for one in own}
        for key, source in {"task.path": tasks.training, **own_sets}.items():
            if isinstance(source, HasGolds):
                await check_golds(source.golds(), key)
    if config.evaluation.sets and not config.evaluation.every:
        log.warning("evaluation.sets: none of them is asked, because evaluation.every is 0")
    prompt, tokenizer = tasks.training.prompt(0), tasks.tokenizer
    if asked and kind == "exact" and not prompt.answer:
        hint = "name the column in task.columns.answer, or another scorer"
        raise ConfigError("scoring.scorer", got="exact, but the first prompt has no answer", expected="answers to compare with", hint=hint)
    if not section.try_first:
        return
    response = tokenizer.encode(prompt.answer) or (tokenizer.eos,)
    sampled = (False,) * len(prompt.tokens) + (True,) * len(response)
    sample = Sample(prompt.text, prompt.answer, prompt.answer, (*prompt.tokens, *response), sampled, columns=prompt.columns)
    for name, stage in (("scorer", scorer), ("teacher", teacher)):
        try:
            if isinstance(stage, LimitedScorer) and (asked or name == "teacher"):
                score = await stage.attempt(sample)
                if name == "scorer" and score.metrics and config.objective.advantage == "gdpo":
                    _check_weights(config.objective.advantage_options, score.metrics)
        except TrajectoryRejected as rejected:
            raise _refused(name, kind, rejected) from rejected


def _check_weights(options: Mapping[str, Any] | None, metrics: Mapping[str, float]) -> None:
    """Refuse weights of metrics that the scorer does not give: a batch without any of them would train nothing."""
    if unknown := [name for name in (options or {}).get("weights", {}) if name not in metrics]:
        got, expected = f"weights for {', '.join(unknown)}", f"only the metrics that scoring.scorer returned: {', '.join(metrics)}"
        raise ConfigError(
            "objective.advantage_options", got=got, expected=expected, hint="return them for the first prompt's own answer, too"
        )


def _refused(stage: str, target: str, rejected: TrajectoryRejected) -> ConfigError:
    key = "scoring.teacher.url" if stage == "teacher" else "scoring.scorer"
    detail = str(rejected).removeprefix(f"{rejected.reason}: ").replace(", expected ", " instead of ")
    hint = None
    if isinstance(rejected, ScorerRaised):
        hint = "its traceback is above, or in logs/rollout-1.log of a run that has started"
    if rejected.reason in (TIMEOUT, UNAVAILABLE):
        wait = "start it first" if rejected.reason == UNAVAILABLE else f"raise {key.rpartition('.')[0]}.timeout_s"
        hint = f"{wait}, or set scoring.try_first=false if it is ready only later"
    whose = "the teacher" if stage == "teacher" else target
    did = ", which raised" if isinstance(rejected, ScorerRaised) else ", which failed:"
    return ConfigError(key, got=f"{whose}{did} {detail}", expected="a score of the first prompt's own answer", hint=hint)


async def check_golds(golds: Iterable[Example], key: str) -> None:
    """Check the first `_CHECKED` distinct reference answers.

    Raises:
        DataError: no answer can equal one of them; names it with file and line.
    """
    distinct: dict[str, Example] = {}
    for gold in golds:
        distinct.setdefault(gold.answer, gold)
    for gold in islice(distinct.values(), _CHECKED):
        try:
            mathematics.reference(gold.answer)
        except ValueError as error:
            got, expected = f"{gold.where} {gold.answer[:_SHOWN_CHARS]!r} ({error})", "an answer that equals itself by math_verify"
            hint = "correct all lines with such an answer, or name another scoring.scorer"
            raise DataError(key, got=got, expected=expected, hint=hint) from error
        await asyncio.sleep(0)
