"""The stages of a scorer: their statistics, and what the user's code in them raised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from asyncmoe.rollout.scoring.limits import LimitedScorer, Stats
from asyncmoe.rollout.scoring.teacher import Taught
from asyncmoe.rollout.scoring.types import Scorer


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


def write_log(scorer: Scorer, run_dir: Path, worker: int) -> None:
    """Write what the user's scorer raised in this rollout worker to `logs/scoring-N.log`, if it raised anything since the last call.

    Raises:
        StorageError: it cannot be written.
    """
    for stage in stages(scorer).values():
        stage.tracebacks.write(run_dir, worker)
