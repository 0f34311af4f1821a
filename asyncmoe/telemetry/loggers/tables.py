"""Samples as tables, for `telemetry.loggers.samples`: a row for each response of the kept groups that were trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from asyncmoe.telemetry.samples import plain
from asyncmoe.telemetry.samples.index import GroupSample, index, load
from asyncmoe.telemetry.samples.tokens import tokens_of

COLUMNS = ("step", "group", "version", "question", "answer", "agent", "response", "reward", "advantage", "finish", "tokens")
_MOST_ROWS = 500
_MOST_TEXT = 8000
"""Longest text of a cell, in characters; of a longer one the middle is left out."""

Row = tuple[str | int | float | None, ...]


@dataclass(frozen=True)
class LoggedTable:
    """Rows of `COLUMNS`, by step; `step` is the last one's."""

    step: int
    rows: list[Row]


def tables(run_dir: Path, after: int, through: int) -> Iterator[LoggedTable]:
    """Yield the samples of the steps after `after` up to `through`, the steps whole, about 500 rows a table.

    Raises:
        DataError: the run has no samples, or a record has changed meanwhile.
    """
    found = index(run_dir)
    wanted = sorted((one for one in found.entries if one.step is not None and after < one.step <= through), key=lambda one: one.step or 0)
    rows: list[Row] = []
    last = after
    for step, entries in groupby(wanted, key=lambda one: one.step or 0):
        rows += [row for entry in entries for row in _rows(load(found, entry), step)]
        last = step
        if len(rows) >= _MOST_ROWS:
            yield LoggedTable(step, rows)
            rows = []
    if rows:
        yield LoggedTable(last, rows)


def _rows(sample: GroupSample, step: int) -> Iterator[Row]:
    group = sample.group
    for member in group.members:
        trained = sample.trained.get(member.key)
        if trained is None:
            continue
        text = plain.text_of(tokens_of(group, member, trained))
        texts = (_short(group.question), _short(group.answer), member.name, _short(text))
        sampled = sum(count for role, count in member.roles if role == "response")
        yield (step, group.group, group.version, *texts, member.reward, plain.advantage(trained), member.finish, sampled)


def _short(text: str) -> str:
    half = _MOST_TEXT // 2
    return text if len(text) <= _MOST_TEXT else f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
