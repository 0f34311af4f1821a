"""What is checked before engines start: that the scorer scores, and that reference answers equal themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError, TrajectoryRejected
from asyncmoe.rollout.scoring import mathematics
from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.scoring.loading import scorer_kind
from asyncmoe.rollout.scoring.raised import ScorerRaised
from asyncmoe.rollout.scoring.stages import stages
from asyncmoe.rollout.scoring.types import GARBAGE, NAN, TIMEOUT, UNAVAILABLE, Sample, Scorer
from asyncmoe.rollout.tasks import EvaluationQuestions, Gold, HasGolds, Task
from asyncmoe.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_SCORED = ("single_turn", "tools")
"""Kinds of environments that leave the reward to the scorer."""
_CHECK_S = 60.0
"""Limit for the check of one file's answers."""
_SHOWN = 5
_SHOWN_CHARS = 60


async def before_engines(
    config: Config, tokenizer: Tokenizer, task: Task, evaluated: Sequence[EvaluationQuestions], scorer: Scorer
) -> None:
    """Check the reference answers, and try the scorer and the teacher with the first prompt.

    An environment of the user's own may give the rewards itself; then `scoring.scorer: auto` is not checked.

    Raises:
        DataError: an answer does not equal itself.
        ConfigError: scorer or teacher does not return a score, or the scorer compares with an answer that the first prompt does not have.
    """
    section = config.scoring
    kind = scorer_kind(section, config.task)
    asked = section.scorer != "auto" or config.environment.kind in _SCORED
    if asked and kind == "math_verify":
        own_sets = {f"evaluation.sets.{one.name}" if one.name else "evaluation.path": one.task for one in evaluated if one.task is not task}
        for key, source in {"task.path": task, **own_sets}.items():
            if isinstance(source, HasGolds):
                await check_golds(source.golds(), key, _CHECK_S)
    if config.evaluation.sets and not config.evaluation.every:
        log.warning("evaluation.sets: none of them is asked, because evaluation.every is 0")
    prompt = task.prompt(0)
    if asked and kind == "exact" and not prompt.answer:
        hint = "name the column in task.columns.answer, or another scorer"
        raise ConfigError("scoring.scorer", got="exact, and the first prompt has no answer", expected="answers to compare with", hint=hint)
    if not section.try_first:
        return
    response = tokenizer.encode(prompt.answer) or (tokenizer.eos,)
    sampled = (False,) * len(prompt.tokens) + (True,) * len(response)
    tried = {name: stage for name, stage in stages(scorer).items() if asked or name == "teacher"}
    await try_once(
        tried, Sample(prompt.text, prompt.answer, prompt.answer, (*prompt.tokens, *response), sampled, columns=prompt.columns), kind
    )


async def try_once(stages: Mapping[str, LimitedScorer], sample: Sample, target: str) -> None:
    """Ask each stage for the score of one sample, once.

    Args:
        stages: see `asyncmoe.rollout.scoring.stages.stages`.
        sample: the first prompt, with its own answer for a response.
        target: the configured scorer, for messages.

    Raises:
        ConfigError: a stage did not return a score.
    """
    for name, stage in stages.items():
        try:
            await stage.attempt(sample)
        except TrajectoryRejected as rejected:
            raise _refused(name, target, rejected) from rejected


def _refused(stage: str, target: str, rejected: TrajectoryRejected) -> ConfigError:
    key = "scoring.teacher.url" if stage == "teacher" else "scoring.scorer"
    detail = str(rejected).removeprefix(f"{rejected.reason}: ")
    hint = None
    if isinstance(rejected, ScorerRaised):
        hint = "its traceback is in logs/rollout-1.log of the run directory"
    if rejected.reason in (TIMEOUT, UNAVAILABLE):
        limit = "scoring.teacher.timeout_s" if stage == "teacher" else "scoring.timeout_s"
        wait = "start it first" if rejected.reason == UNAVAILABLE else f"raise {limit}"
        hint = f"{wait}, or set scoring.try_first=false if it is ready only later"
    whose = "the teacher" if stage == "teacher" else target
    did = ", which raised" if isinstance(rejected, ScorerRaised) else ", which failed:"
    expected = "a score of the first prompt's own answer"
    if rejected.reason in (GARBAGE, NAN) and ", expected " in detail:  # one error says once what was expected
        detail, _, wanted = detail.rpartition(", expected ")
        expected = f"{expected}: {wanted}"
    return ConfigError(key, got=f"{whose}{did} {detail}", expected=expected, hint=hint)


async def check_golds(golds: Iterable[Gold], key: str, limit_s: float) -> None:
    """Check each distinct reference answer: whether it is one, and whether another notation than its own can equal it, which is logged.

    Args:
        limit_s: limit for all; what it leaves is not checked.

    Raises:
        DataError: no answer can equal some; names the first of them with file and line.
    """
    distinct: dict[str, Gold] = {}
    for gold in golds:
        distinct.setdefault(gold.answer, gold)
    wrong, as_text, deadline = list[str](), list[str](), asyncio.get_running_loop().time() + limit_s
    for number, gold in enumerate(distinct.values()):
        if asyncio.get_running_loop().time() > deadline:
            log.warning("%s: no time to check %d distinct answers; one that is unusable rejects its group", key, len(distinct) - number)
            break
        said = f"{gold.where} {gold.answer[:_SHOWN_CHARS]!r}"
        try:
            if mathematics.self_score(gold.answer) < 1:
                as_text.append(said)
        except ValueError as error:
            wrong.append(f"{said} ({error})")
        await asyncio.sleep(0)
    if as_text:
        log.warning("%s: math_verify reads no expression in some answers, so only the same text equals them: %s", key, _list(as_text))
    if wrong:
        got, expected = f"unusable answers: {_list(wrong)}", "answers that equal themselves by math_verify"
        raise DataError(key, got=got, expected=expected, hint="correct all lines with them, or name another scoring.scorer")


def _list(found: Sequence[str]) -> str:
    more = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
