"""Everything that the page shows of a run, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from asyncmoe.errors import DataError
from asyncmoe.telemetry.report import figures, summary_table
from asyncmoe.telemetry.report.figures import Figure
from asyncmoe.telemetry.report.page import pack
from asyncmoe.telemetry.report.sample_groups import Head, by_interest, group_page, heads
from asyncmoe.telemetry.report.settings import settings
from asyncmoe.telemetry.report.summary_table import Row
from asyncmoe.telemetry.report.timeline import TimelineFigure, timelines
from asyncmoe.telemetry.run import RunRecords, broken_configuration, load_readable
from asyncmoe.telemetry.samples.index import Index, index
from asyncmoe.telemetry.samples.index import load as load_sample
from asyncmoe.telemetry.samples.visible import visible
from asyncmoe.telemetry.summary import summary_of
from asyncmoe.telemetry.versions import read as read_versions

SECTIONS: Mapping[str, str] = {
    "Learning": "",
    "Staleness": "Age: the trainer's version minus the version that sampled the token.",
    "Agreement of engines and trainer": "How far apart the two are in what they make of the same tokens. Where routing is kept, tokens "
    "that the trainer's router would have sent elsewhere are trained through the experts that sampled them.",
    "Idle time and queue": "Who waits for whom.",
    "Weight updates": "",
    "Throughput": "",
}
"""Titles and notes of the sections with declared figures."""
FIRST = {"Learning": ("Mean reward", "Evaluation", "Evaluation, pass@k by k", "Response length", "Policy loss", "Entropy")}
"""Declared figures that come first in their sections."""
MOST_GROUPS = 200
MOST_GROUP_BYTES = 6 << 20
"""Bounds on the groups that a file has: their number, and their bytes in it."""
_NO_STEP = "no step is recorded yet; the tab Samples has the groups that were kept so far, and why they were rejected"
MOST_TOKENS = 1500
"""Tokens of a response in a file, from both ends."""


@dataclass(frozen=True)
class PageSection:
    """A section of figures."""

    title: str
    note: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class SampleList:
    """The groups that the page has. total: those that the run kept; notes: what a reader should know, or why there is no group."""

    heads: Sequence[Head]
    total: int
    notes: Sequence[str]


@dataclass(frozen=True)
class RunPage:
    """What the page shows of a run.

    Attributes:
        waiting: why there is no step to show yet; "" once one is recorded.
        notes: records that were left out; `advice` ends with them.
        rest: the recorded metrics that no other section has.
        versions: those of the newest start; {} if none were recorded.
        changed: what of them was otherwise at earlier starts, in words.
    """

    name: str
    what: str = ""
    waiting: str = ""
    notes: Sequence[str] = ()
    advice: Sequence[str] = ()
    summary: Sequence[Row] = ()
    timelines: Sequence[TimelineFigure] = ()
    sections: Sequence[PageSection] = ()
    rest: PageSection = PageSection(figures.REST, "", ())
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    changed: str = ""
    samples: SampleList = SampleList((), 0, ())


def run_page(run_dir: Path, name: str, samples: SampleList) -> RunPage:
    """Read a run, finished or running. Damaged lines are left out with a note.

    Raises:
        DataError: nothing is recorded, or a path is no file.
    """
    run = load_readable(run_dir)
    summary, notes = summary_of(run), list(run.notes)
    versions, changed = _versions(run_dir, notes)
    notes = [visible(note) for note in notes]
    broken = broken_configuration(run_dir)
    return RunPage(
        name=name,
        what=summary_table.what_it_was(run, summary),
        waiting="" if run.steps else _NO_STEP,
        notes=notes,
        advice=[*summary_table.advice(run, summary), *notes, *([] if broken is None else [visible(broken)])],
        summary=summary_table.rows(run, summary),
        timelines=timelines(run),
        sections=[PageSection(title, note, list(_drawn(run, title))) for title, note in SECTIONS.items()],
        rest=PageSection(figures.REST, "", list(figures.rest(run))),
        settings=settings(run_dir),
        versions=versions,
        changed=changed,
        samples=samples,
    )


def names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run, as short as tells them apart."""
    paths = [path.resolve() for path in run_dirs]
    depths = range(1, max(len(path.parts) for path in paths) + 1)
    tried = [[visible("/".join(path.parts[-depth:]).lstrip("/")) for path in paths] for depth in depths]
    return next((found for found in tried if len(set(found)) == len(found)), tried[-1])


def kept_groups(run_dir: Path) -> Index | str:
    """Return the index of a run's samples, or why it has none."""
    try:
        return index(run_dir)
    except DataError as error:
        return visible(str(error))
    except PermissionError:
        return visible(f"samples of {run_dir}: only their owner can read them")


def embedded(run_dir: Path, runs: int = 1) -> tuple[SampleList, dict[int, bytes]]:
    """Choose the groups that a file has, within its bounds, and return their list and each one encoded (`page.pack`), by its place.

    Args:
        runs: number of the runs that share the bytes.
    """
    found = kept_groups(run_dir)
    if isinstance(found, str):
        return SampleList((), 0, (found,)), {}
    packed: dict[int, bytes] = {}
    notes, room = list(found.notes), MOST_GROUP_BYTES // runs
    for place in islice(by_interest(len(found.entries)), MOST_GROUPS):
        try:
            data = pack(encoded_group(found, place, MOST_TOKENS))
        except DataError as error:
            notes.append(visible(f"a group is left out: {error}"))
            continue
        if len(data) > room:
            break
        packed[place], room = data, room - len(data)
    return SampleList(heads(found, sorted(packed)), len(found.entries), notes), packed


def encoded_group(found: Index, place: int, most: int = 0) -> bytes:
    """Return the JSON of a group (`sample_groups.group_page`). Raises DataError: its records cannot be read."""
    return msgspec.json.encode(group_page(load_sample(found, found.entries[place]), place, most))


def _drawn(run: RunRecords, section: str) -> Iterator[Figure]:
    declared = figures.titles(section)
    first = [title for title in FIRST.get(section, ()) if title in declared]
    if section == "Idle time and queue":
        yield from figures.idle(run)
    for title in [*first, *(title for title in declared if title not in first)]:
        yield from figures.declared_figures(run, title)
    if section == "Learning":
        yield from figures.warmup_loss(run)


def _versions(run_dir: Path, notes: list[str]) -> tuple[Mapping[str, str], str]:
    """Return the versions of the newest start, and in words what earlier starts had otherwise."""
    starts = read_versions(run_dir, notes)
    if not starts:
        return {}, ""
    last = starts[-1].versions
    differing = sorted({(name, value) for start in starts[:-1] for name, value in start.versions.items() if last.get(name) != value})
    return last, ", ".join(f"{name} {value}" for name, value in differing)
