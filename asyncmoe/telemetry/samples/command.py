"""`asyncmoe show`: select samples of a run and print them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from asyncmoe.errors import DataError, UserError
from asyncmoe.telemetry.samples import terminal
from asyncmoe.telemetry.samples.index import Entry, Outcome, index
from asyncmoe.telemetry.samples.tokens import as_json

DEFAULT_LIMIT = 3
DEFAULT_TOKENS = 400


@dataclass(frozen=True)
class SampleQuery:
    """Conditions on the samples to show; None: no condition.

    Attributes:
        step: trained in this step (`telemetry.schema.Step.step`).
        group: number of the prompt.
        version: has a token that this version sampled.
        outcome: outcome of the group.
        order: worst: lowest mean reward first; best: highest first; newest: last written first.
        limit: maximum number of groups; None: `DEFAULT_LIMIT`, or all of the requested step or group.
    """

    step: int | None = None
    group: int | None = None
    version: int | None = None
    outcome: Outcome | None = None
    order: Literal["worst", "best", "newest"] = "newest"
    limit: int | None = None

    def takes(self, entry: Entry) -> bool:
        """Whether a group meets all conditions."""
        same = ((self.step, entry.step), (self.group, entry.group), (self.outcome, entry.outcome))
        return all(asked in (None, it) for asked, it in same) and (self.version is None or self.version in entry.versions)


def select(found: Sequence[Entry], wanted: SampleQuery) -> list[Entry]:
    """Return the groups to show. Without a condition, these are the kept groups of the newest step that trained any.

    Raises:
        DataError: no group meets the conditions; the message says which groups there are.
    """
    chosen = [entry for entry in found if wanted.takes(entry)]
    if not chosen:
        expected = f"conditions that some of the kept groups meet ({summary(found)})"
        raise DataError("samples of the run", got="no group that meets the conditions", expected=expected)
    if wanted.order == "newest":
        if wanted == SampleQuery(limit=wanted.limit) and (steps := [entry.step for entry in chosen if entry.step is not None]):
            chosen = [entry for entry in chosen if entry.step == max(steps)]
        chosen = chosen[::-1]
    else:
        sign = 1 if wanted.order == "worst" else -1
        chosen.sort(key=lambda entry: (entry.reward is None, sign * (entry.reward or 0.0)))
    pinned = wanted.step is not None or wanted.group is not None
    limit = wanted.limit if wanted.limit is not None else len(chosen) if pinned and wanted.order == "newest" else DEFAULT_LIMIT
    return chosen[:limit]


def summary(found: Sequence[Entry]) -> str:
    """Return a line on all samples: "24 groups: 20 trained, 4 rejected"."""
    outcomes = Counter(entry.outcome for entry in found).most_common()
    return f"{len(found)} groups: {', '.join(f'{count} {outcome}' for outcome, count in outcomes)}"


def show(run_dir: Path, wanted: SampleQuery, json: bool, tokens: int | None) -> None:
    """Print samples of a run to standard output.

    Args:
        tokens: maximum tokens shown of each prompt and of each response. 0: all; None: `DEFAULT_TOKENS`, or all in JSON.

    Raises:
        DataError: the run has no samples, or none that meet the conditions.
        UserError: standard output is closed.
    """
    if sys.__stdout__ is None:
        raise UserError("standard output", got="closed", expected="a writable file, pipe or terminal")
    found = index(run_dir)
    chosen = select(found, wanted)
    try:
        for entry in chosen if json else ():
            print(as_json(entry.load(), tokens or 0))
        if not json:
            console = Console(highlight=False, markup=False, emoji=False)
            console.print(f"{run_dir} · {summary(found)}", style="bold")
            for entry in chosen:
                terminal.show(entry.load(), console, DEFAULT_TOKENS if tokens is None else tokens)
            if len(chosen) < len(found):
                console.print(f"{len(chosen)} of {len(found)} groups; asyncmoe show --help tells how to choose others", style="dim")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
