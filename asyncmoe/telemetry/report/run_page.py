"""The content of the page of runs, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncmoe.config.moved import FILE
from asyncmoe.errors import DataError
from asyncmoe.telemetry import heartbeats
from asyncmoe.telemetry.advice import Advice, advise, merged
from asyncmoe.telemetry.loggers.points import flat
from asyncmoe.telemetry.report import figures, timeline
from asyncmoe.telemetry.report.figures import PageSection
from asyncmoe.telemetry.run import load
from asyncmoe.telemetry.samples.index import index
from asyncmoe.telemetry.samples.records import REJECTED
from asyncmoe.telemetry.samples.tokens import as_json
from asyncmoe.telemetry.samples.visible import visible
from asyncmoe.telemetry.secrets import HIDDEN, is_secret, without_users
from asyncmoe.telemetry.summary import Row, difference, rows, summary_of, what_it_was
from asyncmoe.telemetry.versions import read as read_versions

_MOST_TEXT = 2000
MOST_GROUPS, MOST_TOKENS = 200, 1500
"""Maximum groups on a page over all its runs, and maximum tokens of a response, taken from both ends."""
MOST_BYTES = 32 << 20
"""Maximum bytes of JSON of all groups of a page; packing reduces them to about a sixth."""


@dataclass(frozen=True)
class RunPage:
    """The content of the page for a run, apart from its figures.

    Attributes:
        newest: time of the newest record, in Unix seconds; None if no record has a time.
        ended: whether the run has ended successfully.
        versions: software versions at the newest start; {} if none were recorded.
        samples: a note to readers about the groups shown.
    """

    name: str
    what: str
    newest: float | None
    ended: bool
    summary: Sequence[Row]
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    samples: str


@dataclass(frozen=True)
class Page:
    """A page of runs.

    Attributes:
        differences: for a page of two runs, the second's value minus the first's, by name of the row.
        rules: by letter of `Trained.states`, the rule that rejected the token.
    """

    runs: Sequence[RunPage]
    advice: Sequence[Advice]
    differences: Mapping[str, str]
    sections: Sequence[PageSection]
    rules: Mapping[str, str] = field(default_factory=lambda: REJECTED)


def page_of(run_dirs: Sequence[Path], samples: bool = False) -> tuple[Page, list[list[str]]]:
    """Read runs, finished or running.

    Returns:
        The page, and each run's groups in JSON (`samples.tokens.as_json`), none without `samples`.

    Raises:
        DataError: nothing is recorded, or a record is damaged.
    """
    run_dirs = list(dict.fromkeys(path.resolve() for path in run_dirs))
    runs = {name: load(run_dir) for name, run_dir in zip(names(run_dirs), run_dirs, strict=True)}
    groups = [_groups(run_dir, len(runs)) if samples else ([], "this page was made without samples") for run_dir in run_dirs]
    pages = [
        RunPage(
            name=name,
            what=what_it_was(run, summary := summary_of(run)),
            newest=run.newest,
            ended=_ended(run_dir),
            summary=rows(run, summary),
            settings=settings(run_dir),
            versions=read_versions(run_dir),
            samples=note,
        )
        for run_dir, (name, run), (_, note) in zip(run_dirs, runs.items(), groups, strict=True)
    ]
    advice = merged({name: advise(run.rl, run.rollout) for name, run in runs.items()})
    first, second = ({row.name: row for row in page.summary} for page in pages) if len(pages) == 2 else ({}, {})
    differences = {name: difference(first[name], second[name]) for name in first if name in second}
    return Page(pages, advice, differences, [timeline.section(runs), *figures.sections(runs)]), [found for found, _ in groups]


def _ended(run_dir: Path) -> bool:
    """Whether the last heartbeat of every process that a run needs says that the process has ended."""
    needed = [beat for role, beat in heartbeats.read(run_dir).items() if heartbeats.ends_the_run(role)]
    return bool(needed) and all(beat.does == heartbeats.ENDED for beat in needed)


def names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its directory, or the whole path if names coincide."""
    short = len({path.name for path in run_dirs}) == len(run_dirs)
    return [visible(path.name if short else str(path)) for path in run_dirs]


def _groups(run_dir: Path, runs: int) -> tuple[list[str], str]:
    """Return the newest groups of one of the page's runs, newest first, and a note to readers."""
    try:
        entries = index(run_dir)
    except (DataError, PermissionError) as error:
        return [], visible(str(error))
    groups, room = list[str](), MOST_BYTES // runs
    for entry in reversed(entries[-(MOST_GROUPS // runs) :]):
        text = as_json(entry.load(), MOST_TOKENS)
        if (room := room - len(text)) < 0:
            break
        groups.append(text)
    more = f"the newest {len(groups)} of {len(entries)} kept groups; asyncmoe show has all of them"
    return groups, more if len(groups) < len(entries) else ""


def settings(run_dir: Path) -> dict[str, str]:
    """Return the resolved configuration, by path of the key ("rollout.group_size"); {} if the run has no config.yaml that can be read.

    Secrets are hidden (`asyncmoe.telemetry.secrets`).
    """
    try:
        values = yaml.safe_load((run_dir / FILE).read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return {}
    return {visible(path): visible(_shown(path, value)) for path, value in flat(values).items()} if isinstance(values, Mapping) else {}


def _shown(path: str, value: Any) -> str:
    if isinstance(value, str) and value and is_secret(path):
        return HIDDEN
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return without_users(text)[:_MOST_TEXT]
