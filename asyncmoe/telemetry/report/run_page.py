"""Everything that the page shows of runs, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from asyncmoe.errors import DataError
from asyncmoe.telemetry.advice import advise
from asyncmoe.telemetry.gauges import gauge
from asyncmoe.telemetry.report import figures, timeline
from asyncmoe.telemetry.report.figures import PageSection
from asyncmoe.telemetry.report.settings import settings
from asyncmoe.telemetry.run import RunRecords, broken_configuration, load
from asyncmoe.telemetry.samples.as_json import as_json
from asyncmoe.telemetry.samples.index import index
from asyncmoe.telemetry.samples.index import load as load_group
from asyncmoe.telemetry.samples.records import REJECTED
from asyncmoe.telemetry.samples.visible import visible
from asyncmoe.telemetry.summary import Row, rows, summary_of, what_it_was
from asyncmoe.telemetry.versions import read as read_versions

MOST_GROUPS, MOST_TOKENS = 200, 1500
"""Groups that a page has of its runs, and tokens of a response, from both ends."""
MOST_BYTES = 32 << 20
"""Bound on the JSON of all groups of a page, of which about a sixth is left when it is packed."""
_NEWEST = 20


@dataclass(frozen=True)
class RunPage:
    """What the page shows of a run besides its figures.

    Attributes:
        notes: records that were left out; `advice` ends with them.
        versions: those of the newest start; {} if none were recorded.
        changed: what of them was otherwise at earlier starts, in words.
        samples: what a reader should know of the groups.
    """

    name: str
    what: str
    notes: Sequence[str]
    advice: Sequence[str]
    summary: Sequence[Row]
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    changed: str
    samples: Sequence[str]


@dataclass(frozen=True)
class Page:
    """A page of runs. rules: the rule behind each letter of a token that is not trained on."""

    runs: Sequence[RunPage]
    sections: Sequence[PageSection]
    rules: Mapping[str, str] = field(default_factory=lambda: REJECTED)


def page_of(run_dirs: Sequence[Path], samples: bool = False) -> tuple[Page, list[list[str]]]:
    """Read runs, finished or running, without damaged lines, which notes name.

    Returns:
        The page, and each run's groups in JSON (`samples.as_json.as_json`), without `samples` none.

    Raises:
        DataError: nothing is recorded, or a path is no file.
    """
    runs = {name: load(run_dir) for name, run_dir in zip(names(run_dirs), run_dirs, strict=True)}
    groups = [_groups(run_dir, len(runs)) if samples else ([], ["this page was made without samples"]) for run_dir in run_dirs]
    pages = [_run_page(run_dir, name, run, notes) for run_dir, (name, run), (_, notes) in zip(run_dirs, runs.items(), groups, strict=True)]
    return Page(pages, [timeline.section(runs), *figures.sections(runs)]), [found for found, _ in groups]


def names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run, as short as tells them apart."""
    paths = [path.resolve() for path in run_dirs]
    depths = range(1, max(len(path.parts) for path in paths) + 1)
    tried = [[visible("/".join(path.parts[-depth:]).lstrip("/")) for path in paths] for depth in depths]
    return next((found for found in tried if len(set(found)) == len(found)), tried[-1])


def _run_page(run_dir: Path, name: str, run: RunRecords, samples: Sequence[str]) -> RunPage:
    summary, notes = summary_of(run), list(run.notes)
    versions, changed = _versions(run_dir, notes)
    notes = [visible(note) for note in notes]
    broken = broken_configuration(run_dir)
    return RunPage(
        name=name,
        what=what_it_was(run, summary),
        notes=notes,
        advice=[*advise(gauge(run.rl, run.rollout)), *notes, *([] if broken is None else [visible(broken)])],
        summary=rows(run, summary),
        settings=settings(run_dir),
        versions=versions,
        changed=changed,
        samples=samples,
    )


def _groups(run_dir: Path, runs: int) -> tuple[list[str], list[str]]:
    """Return the groups that a page has of one of its runs, newest first, and what a reader should know: the newest ones and, within the
    page's bounds, some that are drawn from the whole run."""
    try:
        found = index(run_dir)
    except DataError as error:
        return [], [visible(str(error))]
    except PermissionError:
        return [], [f"samples of {visible(str(run_dir))}: only their owner can read them"]
    older = max(len(found.entries) - _NEWEST, 0)
    wanted = [*range(len(found.entries) - 1, older - 1, -1), *Random(0).sample(range(older), older)]
    notes, groups, room = [visible(note) for note in found.notes], {}, MOST_BYTES // runs
    for place in wanted[: MOST_GROUPS // runs]:
        try:
            text = as_json(load_group(found, found.entries[place]), MOST_TOKENS)
        except DataError as error:
            notes.append(visible(f"a group is left out: {error}"))
            continue
        if (room := room - len(text)) < 0:
            break
        groups[place] = text
    if len(groups) < len(found.entries):
        notes.append(f"{len(groups)} of {len(found.entries)} kept groups; asyncmoe show has all of them")
    return [groups[place] for place in sorted(groups, reverse=True)], notes


def _versions(run_dir: Path, notes: list[str]) -> tuple[Mapping[str, str], str]:
    """Return the versions of the newest start, and in words what earlier starts had otherwise."""
    starts = read_versions(run_dir, notes)
    if not starts:
        return {}, ""
    last = starts[-1].versions
    differing = sorted({(name, value) for start in starts[:-1] for name, value in start.versions.items() if last.get(name) != value})
    return last, ", ".join(f"{name} {value}" for name, value in differing)
