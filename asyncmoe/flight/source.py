"""A recorded run: which of its steps can be trained again, from which checkpoint, and with which configurations."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from asyncmoe import config as configuration
from asyncmoe.checkpoints import directories, intact
from asyncmoe.config import Config
from asyncmoe.errors import DataError, UserError
from asyncmoe.flight import records
from asyncmoe.flight.batches import Batches
from asyncmoe.flight.records import Started, StepRecords

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConfiguredSteps:
    """Consecutive steps that were trained under one configuration.

    Attributes:
        start: how they were trained.
        first, last: steps taken before and after them.
    """

    start: Started
    first: int
    last: int


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run, which may be in progress.

    Attributes:
        config: its newest configuration.
    """

    folder: Path
    config: Config
    recorded: StepRecords
    batches: Batches

    @classmethod
    def of(cls, folder: Path) -> RecordedRun:
        """Read a run's records. Raises UserError: it has none, or they are damaged."""
        config = configuration.of_run(folder)
        return cls(folder, config, records.read(folder), Batches(folder, config.log))

    @property
    def steps(self) -> list[int]:
        """The steps that have a record, and a batch in the log, ascending."""
        kept = {*self.batches.kept}
        return [step for step in sorted(self.recorded.steps) if step - 1 in kept]

    @property
    def bases(self) -> list[int]:
        """Steps taken at the states from which training can begin: checkpoints, and 0 for the model's files, ascending."""
        taken = [step for path in directories.complete(self.folder) if (step := directories.step_of(path.name)) is not None]
        return taken if self.config.warmup.steps else [0, *taken]

    def checkpoint(self, taken: int) -> Path | None:
        """Return the checkpoint of one of `bases`; None: the model's files."""
        return directories.directory(self.folder, taken) if directories.directory(self.folder, taken).exists() else None

    def base(self, step: int) -> int:
        """Return the steps taken at the newest state with at most `step` steps, without regard to checkpoints that are damaged.

        Raises:
            DataError: there is none.
        """
        for one in reversed([one for one in self.bases if one <= step]):
            if (checkpoint := self.checkpoint(one)) is None or (fault := intact.fault(checkpoint, intact.QUICK_BYTES)) is None:
                return one
            log.warning("%s is damaged: %s; training begins earlier", checkpoint.name, fault)
        got = f"checkpoints of steps {ranges(self.bases)}" if self.bases else "no checkpoint"
        raise DataError(str(self.folder), got=got, expected=f"one of step {step} or earlier, to begin with", hint=self._hint)

    @property
    def _hint(self) -> str:
        there, newest = ranges(self.steps) or "none", self._newest
        possible = "" if newest is None else f"steps {newest[0]} to {newest[1]} can be replayed; "
        return f"{possible}steps with a record and a batch: {there}; log.keep sets how many are kept, and the warm-up is not recorded"

    def stretches(self, first: int, last: int) -> list[ConfiguredSteps]:
        """Split steps `first + 1` to `last` into stretches.

        Raises:
            DataError: a step has no record or no batch any more; names the steps that have.
        """
        there = {*self.steps}
        if (lacking := next((step for step in range(first + 1, last + 1) if step not in there), None)) is not None:
            got = f"step {lacking} without {'a batch in the log' if lacking in self.recorded.steps else 'a record'}"
            raise DataError(str(self.folder), got=got, expected="a record and a batch of every step", hint=self._hint)

        def kind(step: int) -> tuple[object, ...]:
            start = self.recorded.starts[step]
            return start.config, start.circumstances.get("threads")

        runs = [list(steps) for _, steps in groupby(range(first + 1, last + 1), kind)]
        return [ConfiguredSteps(self.recorded.starts[steps[0]], steps[0] - 1, steps[-1]) for steps in runs]

    @property
    def newest(self) -> tuple[int, int]:
        """The first and the last of the newest consecutive steps that can be trained again. Raises DataError: there is none."""
        if (found := self._newest) is None:
            raise DataError(str(self.folder), got="no batch of a step after a checkpoint", expected="some", hint=self._hint)
        return found

    @property
    def _newest(self) -> tuple[int, int] | None:
        there = {*self.steps}
        first = last = max(there, default=0)
        while first - 1 in there:
            first -= 1
        begins = [one for one in self.bases if first - 1 <= one < last]
        return (begins[0] + 1, last) if begins else None


def ranges(steps: Collection[int]) -> str:
    """Format steps: "3 to 7, 9"."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in found)


def described(run_dir: Path) -> str:
    """Return a line that says which steps of a run can be trained again, or why none can. Reads every batch."""
    try:
        source = RecordedRun.of(run_dir)
        first, last = source.newest
    except UserError as error:
        return f"no step can be replayed: {error}"
    checkpoint = source.checkpoint(first - 1)
    begin = "the model's files" if checkpoint is None else f"checkpoint {checkpoint.name}"
    damaged = [step for step in range(first, last + 1) if not source.batches.intact(step - 1)]
    but = f", but not those with damaged batches: {ranges(damaged)}" if damaged else ""
    return f"steps {first} to {last} can be replayed, from {begin}{but}"
