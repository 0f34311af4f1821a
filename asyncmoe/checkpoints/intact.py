"""The checkpoint that a run resumes from: the newest undamaged one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.checkpoints import directories, manifest
from asyncmoe.errors import DataError

QUICK_BYTES = 2 << 30
"""Bytes of a checkpoint to read before a run starts, smallest files first; takes a second or two. Trainer ranks read all of it."""


@dataclass(frozen=True)
class Damaged:
    """A complete but damaged checkpoint: the damaged file, and how it differs from the manifest."""

    path: Path
    fault: str

    def __str__(self) -> str:
        return f"{self.path.name} is damaged: {self.fault}"


@dataclass(frozen=True)
class Survey:
    """The checkpoints of a run.

    Attributes:
        newest: the newest undamaged one; None if the run has no checkpoint.
        damaged: the damaged ones newer than `newest`, newest first.
    """

    newest: Path | None
    damaged: Sequence[Damaged] = ()

    @property
    def lines(self) -> list[str]:
        """Messages for the user before a run resumes."""
        if self.newest is None:
            return []
        return [f"checkpoint {one}; the run resumes from {self.newest.name}" for one in self.damaged]


def survey(run_dir: Path) -> Survey:
    """Find a run's newest undamaged checkpoint, reading `QUICK_BYTES` of each. Changes nothing. Raises as `first_intact`."""
    return first_intact(reversed(directories.complete(run_dir)), lambda path: fault(path, QUICK_BYTES))


def first_intact(checkpoints: Iterable[Path], fault_of: Callable[[Path], str | None]) -> Survey:
    """Find the first undamaged checkpoint.

    Args:
        checkpoints: a run's checkpoints, newest first.

    Raises:
        DataError: the run has checkpoints, and every one is damaged.
    """
    damaged: list[Damaged] = []
    for path in checkpoints:
        if (found := fault_of(path)) is None:
            return Survey(path, damaged)
        damaged.append(Damaged(path, found))
    if not damaged:
        return Survey(None)
    folder = damaged[0].path.parent
    raise DataError(
        str(folder),
        got="; ".join(map(str, damaged)),
        expected="an undamaged checkpoint",
        hint=f"bring a copy back (asyncmoe checkpoints {folder.parent} --restore URL), or delete {folder} to start over",
    )


def fault(checkpoint: Path, most_bytes: int | None = None, rank: int = 0, world: int = 1) -> str | None:
    """Return which file of a checkpoint is damaged, and how; None if all files are undamaged. The sizes of all files are compared.

    Args:
        most_bytes: read the smallest files, up to this many bytes. None: read the share of `rank`; together the `world` ranks read every
            file.

    Raises:
        UserError: the checkpoint may be intact, but cannot be read here.
    """
    try:
        listed = manifest.read(checkpoint)
        names = manifest.share(listed, rank, world) if most_bytes is None else manifest.smallest(listed, most_bytes)
        return manifest.missing_or_cut(checkpoint, listed) or manifest.changed(checkpoint, listed, names)
    except DataError as error:  # the manifest is damaged; reported without the checkpoint's path
        return f"{error.what.removeprefix(f'{checkpoint}/')}: got {error.got}"


def chosen(run_dir: Path, step: int | None) -> Path:
    """Return the checkpoint chosen on the command line, by step or the newest; it may be damaged.

    Raises:
        DataError: the run has no such checkpoint.
    """
    found = directories.complete(run_dir)
    if not found:
        raise DataError(str(run_dir), got="no complete checkpoint", expected="a run directory with checkpoints/step-*")
    if step is None:
        return found[-1]
    if (wanted := directories.directory(run_dir, step)) not in found:
        steps = ", ".join(str(directories.step_of(path.name)) for path in found)
        raise DataError(f"--step {step}", got=f"no complete checkpoint of this step in {run_dir}", expected=f"one of {steps}")
    return wanted


def refused(checkpoint: Path, fault: str) -> DataError:
    """Return the error for exporting a damaged checkpoint; the choice of another is left to the user."""
    older = [path for path in directories.complete(checkpoint.parent.parent) if path < checkpoint]
    hint = f"--step {directories.step_of(older[-1].name)} exports the checkpoint before it" if older else "the run has no older checkpoint"
    return DataError(str(checkpoint), got=f"a damaged checkpoint: {fault}", expected="undamaged files", hint=hint)
