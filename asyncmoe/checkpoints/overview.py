"""The output of `asyncmoe checkpoints RUN`: every checkpoint of a run, its size, and whether it is undamaged."""

from __future__ import annotations

import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncmoe.checkpoints import directories, intact
from asyncmoe.checkpoints.facts_file import facts
from asyncmoe.errors import DataError, gibibytes

State = Literal["verified", "complete", "damaged", "unfinished"]
_MEANINGS: dict[State, str] = {
    "verified": "all files are undamaged",
    "complete": "all files have the right sizes; --verify reads them",
    "damaged": "",
    "unfinished": "being written, or left by a killed save",
}


@dataclass(frozen=True)
class CheckpointLine:
    """A directory below RUN/checkpoints.

    Attributes:
        step: None if the name has none.
        saved: Unix time; None if unknown.
        fault: the damaged file and how it differs from the manifest; "" unless `state` is damaged.
    """

    name: str
    step: int | None
    saved: float | None
    nbytes: int
    state: State
    fault: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the table's line."""
        when = "?" if self.saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved))
        told = self.fault or _MEANINGS[self.state]
        return (self.name, when, gibibytes(self.nbytes), f"{self.state}: {told}")


def overview(run_dir: Path, *, verify: bool = False) -> list[CheckpointLine]:
    """Look at all checkpoints of a run, by name. Changes nothing.

    Args:
        verify: read all files of complete checkpoints; otherwise only sizes are compared.

    Raises:
        DataError: there is no folder of checkpoints.
        UserError: a file cannot be read, although it may be intact.
    """
    folder = run_dir / directories.FOLDER
    if not folder.is_dir():
        found = f"no {directories.FOLDER} in it" if run_dir.is_dir() else "no such directory"
        raise DataError("RUN", got=f"{run_dir}: {found}", expected="the directory of a run that saved a checkpoint")
    return [_line(path, verify) for path in sorted(folder.iterdir()) if path.is_dir() and path.name.startswith("step-")]


def table(lines: Sequence[CheckpointLine]) -> str:
    """Return lines as a table for people, in columns of equal width."""
    rows = [("checkpoint", "saved", "size", "state"), *(line.cells for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows)


def _line(path: Path, verify: bool) -> CheckpointLine:
    aside, fault = directories.DAMAGED in path.name, ""
    state: State = "unfinished"
    if aside or directories.step_of(path.name) is not None:
        fault = intact.fault(path, None if verify else 0) or ("set aside because a file was damaged" if aside else "")
        state = "damaged" if fault else "verified" if verify else "complete"
    step, nbytes = directories.step_of(path.name.partition(".")[0]), sum(map(_size, path.rglob("*")))
    return CheckpointLine(path.name, step, _saved(path), nbytes, state, fault)


def _size(path: Path) -> int:
    """Return a file's size in bytes; 0 for a directory, and for a file that a save has just renamed or deleted."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _saved(path: Path) -> float | None:
    """Return when a checkpoint was saved, according to its facts."""
    try:
        saved = facts(path).get("time")
    except DataError:
        return None
    return float(saved) if isinstance(saved, int | float) else None
