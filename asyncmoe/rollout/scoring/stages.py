"""The stages of a scorer, and their statistics."""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.scoring.teacher import Taught
from asyncmoe.rollout.scoring.types import Scorer
from asyncmoe.telemetry.rollout_schema import Scoring


def untaught(scorer: Scorer) -> Scorer:
    """Return `scorer` without its teacher. A teacher without a scorer is returned unchanged."""
    return scorer.scorer if isinstance(scorer, Taught) and scorer.scorer is not None else scorer


def stats(scorer: Scorer) -> Mapping[str, Scoring]:
    """Return the statistics of each stage of `scorer`, by name: "scorer", "teacher"."""
    return {name: stage.stats() for name, stage in stages(scorer).items()}


def stages(scorer: Scorer) -> Mapping[str, LimitedScorer]:
    """Return the stages of `scorer` that may fail, by name: "scorer", "teacher"."""
    parts = {"scorer": scorer.scorer, "teacher": scorer.teacher} if isinstance(scorer, Taught) else {"scorer": scorer}
    return {name: part for name, part in parts.items() if isinstance(part, LimitedScorer)}
