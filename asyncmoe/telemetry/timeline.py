"""The timeline of a run, reduced to a fixed number of columns: its resolution depends on the figure's width, not on the run's duration.

Time between two starts of a run is omitted: the columns of consecutive windows are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncmoe.telemetry.overlap import Cover, Interval, intersection, length, union
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.schema import What

TRAINER_PARTS: tuple[What, ...] = ("train", "sync", "wait")
BOTH = "both"
"""Name of the lane, and of its part, for time in which the trainer trains while an engine generates."""
MAX_ENGINES = 8
_GRAIN = 1 / 16
"""Shares are rounded to multiples of this; finer differences are invisible in a lane."""


@dataclass(frozen=True)
class TimelineLane:
    """One lane. `parts`: for each part, its share (0 to 1) of each column."""

    name: str
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Timeline:
    """The data of a timeline figure. `edges` are seconds since the start without omitted time, one more than there are columns."""

    windows: Sequence[Interval]
    edges: Sequence[float]
    lanes: Sequence[TimelineLane]
    overlap: float | None
    """Share of the RL training time, within the windows, in which at least one engine was generating."""
    engines_left_out: int

    def position(self, time: float) -> float:
        """Convert a Unix time to seconds since the start without omitted time."""
        return sum(min(max(time, begin), end) - begin for begin, end in self.windows)


def timeline(run: RunRecords, windows: Sequence[Interval], columns: int = 1000) -> Timeline:
    """Build the trainer's lane, a lane for each of the first `MAX_ENGINES` engines, and the lane of their overlap."""
    windows = union(windows)
    cells = _cells(windows, columns)
    generate = run.intervals("generate")
    train = intersection(run.intervals("train", "trainer.0"), windows)
    both = intersection(train, generate)
    trainer = TimelineLane("trainer", {what: _shares(run.intervals(what, "trainer.0"), cells) for what in TRAINER_PARTS})
    engines = [
        TimelineLane(name.replace(".", " "), {"generate": _shares(run.intervals("generate", name), cells)})
        for name in run.engines[:MAX_ENGINES]
    ]
    edges = [0.0]
    for begin, end in cells:
        edges.append(edges[-1] + end - begin)
    rl_train = length(intersection(train, run.rl_windows))
    overlap = length(intersection(both, run.rl_windows)) / rl_train if rl_train > 0 else None
    lanes = [trainer, *engines, TimelineLane(BOTH, {BOTH: _shares(both, cells)})]
    return Timeline(windows, edges, lanes, overlap, max(len(run.engines) - MAX_ENGINES, 0))


def merge_equal(shares: Sequence[float], edges: Sequence[float]) -> tuple[list[float], list[float]]:
    """Merge neighbouring columns of equal share. The drawing is the same, but its file is much smaller."""
    kept = [i for i in range(len(shares)) if i == 0 or shares[i] != shares[i - 1]]
    return [shares[i] for i in kept], [*(edges[i] for i in kept), edges[-1]]


def recent_windows(run: RunRecords, steps: int = 10) -> list[Interval]:
    """Return the time of the last `steps` steps: RL steps if there are any, else warm-up steps."""
    last = (run.rl or run.steps)[-steps:]
    return intersection(run.windows, [(last[0].begin, last[-1].time)])


def _cells(windows: Sequence[Interval], columns: int) -> list[Interval]:
    whole = length(windows)
    cells: list[Interval] = []
    for begin, end in windows:
        count = max(round(columns * (end - begin) / whole), 1)
        cells += [(begin + (end - begin) * i / count, begin + (end - begin) * (i + 1) / count) for i in range(count)]
    return cells


def _shares(intervals: Sequence[Interval], cells: Sequence[Interval]) -> list[float]:
    cover = Cover.of(intervals)
    return [round(cover.within(begin, end) / (end - begin) / _GRAIN) * _GRAIN for begin, end in cells]
