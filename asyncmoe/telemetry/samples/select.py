"""Chooses which of a run's samples are shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from asyncmoe.errors import DataError
from asyncmoe.telemetry.samples.index import Entry, Index, Outcome

DEFAULT_LIMIT = 3


@dataclass(frozen=True)
class SampleQuery:
    """What to show; None: anything.

    Attributes:
        step: trained in this step (`telemetry.schema.Step.step`).
        group: number of the prompt.
        version: has a token that this version sampled.
        outcome: what became of it.
        order: worst: lowest mean reward first; best: highest first; newest: last written first.
        limit: maximum number of groups; None: `DEFAULT_LIMIT`, or all of a step or a group that is asked for.
    """

    step: int | None = None
    group: int | None = None
    version: int | None = None
    outcome: Outcome | None = None
    order: Literal["worst", "best", "newest"] = "newest"
    limit: int | None = None


def select(found: Index, wanted: SampleQuery) -> list[Entry]:
    """Return the groups to show. Without any condition: those of the newest step that trained kept groups.

    Raises:
        DataError: none is as wanted; says what there is.
    """
    chosen = [entry for entry in found.entries if _is(entry, wanted)]
    if not chosen:
        raise DataError(f"samples of {found.run_dir}", got="no group as asked", expected=summary(found))
    free = (wanted.step, wanted.group, wanted.version, wanted.outcome) == (None,) * 4
    if free and wanted.order == "newest" and found.steps:
        chosen = [entry for entry in chosen if entry.step == found.steps[-1]]
    if wanted.order == "newest":
        chosen = chosen[::-1]
    else:
        sign = 1 if wanted.order == "worst" else -1
        scored = [entry for entry in chosen if entry.reward is not None]
        chosen = sorted(scored, key=lambda entry: sign * (entry.reward or 0.0)) + [entry for entry in chosen if entry.reward is None]
    pinned = wanted.step is not None or wanted.group is not None
    limit = wanted.limit if wanted.limit is not None else len(chosen) if pinned and wanted.order == "newest" else DEFAULT_LIMIT
    return chosen[:limit]


def summary(found: Index) -> str:
    """Return a line on all samples: "24 groups: 20 trained, 4 rejected"."""
    outcomes = Counter(entry.outcome for entry in found.entries).most_common()
    return f"{len(found.entries)} groups: {', '.join(f'{count} {outcome}' for outcome, count in outcomes)}"


def _is(entry: Entry, wanted: SampleQuery) -> bool:
    same = ((wanted.step, entry.step), (wanted.group, entry.group), (wanted.outcome, entry.outcome))
    return all(asked in (None, it) for asked, it in same) and (wanted.version is None or wanted.version in entry.versions)
