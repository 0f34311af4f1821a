"""Which steps of a recorded run can be trained again, from which checkpoint, and with which configurations. Pure, except `base`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from asyncmoe.checkpoints import directories
from asyncmoe.errors import DataError
from asyncmoe.flight.records import Recorded, Started


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps that were trained under one configuration.

    Attributes:
        start: how they were trained.
        first, last: steps taken before and after them.
    """

    start: Started
    first: int
    last: int


def stretches(recorded: Recorded, first: int, last: int) -> list[Stretch]:
    """Split steps `first + 1` to `last`, all recorded, into stretches."""

    def kind(step: int) -> tuple[object, ...]:
        start = recorded.starts[step]
        return start.config, start.circumstances.get("threads")

    runs = [list(steps) for _, steps in groupby(range(first + 1, last + 1), kind)]
    return [Stretch(recorded.starts[steps[0]], steps[0] - 1, steps[-1]) for steps in runs]


def base(run_dir: Path, step: int, warmup: int) -> Path | None:
    """Return the newest checkpoint with at most `step` steps; None: the run began with the model's files.

    Raises:
        DataError: there is none.
    """
    taken = [one for path in directories.complete(run_dir) if (one := directories.step_of(path.name)) is not None]
    if earlier := [one for one in taken if one <= step]:
        return directories.directory(run_dir, max(earlier))
    if not warmup:
        return None
    got = f"checkpoints of steps {', '.join(map(str, taken))}" if taken else "no checkpoint"
    hint = "log.keep keeps more steps, with the checkpoint before them"
    raise DataError(str(run_dir), got=got, expected=f"one of step {step} or earlier, to begin with", hint=hint)


def check_kept(run_dir: Path, kept: Collection[int], recorded: Recorded, first: int, last: int) -> None:
    """Refuse steps `first + 1` to `last` if a batch or a record of them is gone. `kept`: numbers of the leases in the log.

    Raises:
        DataError: names the first step that lacks something, and the steps that are there.
    """
    there = [step for step in sorted(recorded.steps) if step - 1 in kept]
    for step in range(first + 1, last + 1):
        if step in there:
            continue
        lacks = "no batch in the log" if step in recorded.steps else "no record"
        got = f"step {step} with {lacks}"
        hint = f"steps {ranges(there)} are there" if there else "no step is there"
        raise DataError(str(run_dir), got=got, expected=f"steps {first + 1} to {last}", hint=f"{hint}; log.keep says how many are kept")


def ranges(steps: Collection[int]) -> str:
    """Format steps: "3 to 7, 9"."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in found)
