"""Checkpoint directories: `RUN/checkpoints/step-00000012/`, either complete or absent.

A checkpoint is written under a temporary name. Once every rank has written its part, all files and the directory are synced, then the
directory is renamed, the rename is synced, and older checkpoints are deleted. So a kill or a power cut at any moment leaves a complete
checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncmoe import storage
from asyncmoe.checkpoints import manifest
from asyncmoe.checkpoints.facts_file import FACTS
from asyncmoe.checkpoints.manifest import Manifest
from asyncmoe.checkpoints.retention import Retention

FOLDER, WINDOW = "checkpoints", "window.json"
_PREFIX = "step-"
_COMPLETE = re.compile(rf"{_PREFIX}(\d{{8,}})")
WRITING, DELETING, DAMAGED = ".writing", ".deleting", ".damaged"


def directory(run_dir: Path, step: int) -> Path:
    """Return the final directory of the checkpoint of `step`."""
    return run_dir / FOLDER / name_of(step)


def name_of(step: int) -> str:
    """Return the name of the directory of the checkpoint of `step`."""
    return f"{_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """Parse the step from the name of a complete checkpoint's directory; None if it is not such a name."""
    found = _COMPLETE.fullmatch(name)
    return None if found is None else int(found[1])


def complete(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints, damaged or not, by step."""
    found = [path for path in (run_dir / FOLDER).glob(f"{_PREFIX}*") if step_of(path.name) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path.name) or 0)


def newest(run_dir: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None. It may be damaged: see `asyncmoe.checkpoints.intact`."""
    return next(reversed(complete(run_dir)), None)


def temporary(run_dir: Path, step: int) -> Path:
    """Return the directory that holds the checkpoint of `step` until it is complete."""
    return directory(run_dir, step).with_suffix(WRITING)


def start(run_dir: Path, step: int) -> None:
    """Create an empty temporary directory for `step`; delete the remains of killed saves."""
    give_up(run_dir)
    temporary(run_dir, step).mkdir(parents=True)


def give_up(run_dir: Path) -> None:
    """Delete incomplete checkpoints."""
    for suffix in (WRITING, DELETING):
        for half in (run_dir / FOLDER).glob(f"{_PREFIX}*{suffix}"):
            shutil.rmtree(half, ignore_errors=True)


def finish(run_dir: Path, step: int, facts: Mapping[str, Any], asked: Retention, sealed: Manifest | None = None) -> Path:
    """Make the checkpoint of `step` visible, and delete those that are no longer kept (`Retention.kept`).

    Args:
        sealed: files that are already synced, such as those of other ranks; all other files are read and synced here.

    Raises:
        OSError: a file cannot be read, written or synced; the checkpoint is then not visible.
    """
    written = temporary(run_dir, step)
    (written / FACTS).write_text(json.dumps(dict(facts), indent=1))
    publish(written, directory(run_dir, step), sealed)
    prune(run_dir, asked)
    return directory(run_dir, step)


def publish(written: Path, final: Path, sealed: Manifest | None = None) -> None:
    """Write a directory's manifest, sync everything, and rename the directory. Arguments and errors as for `finish`."""
    files = dict(sealed or {})
    for name in manifest.names_in(written):
        if name not in files:
            files[name] = manifest.seal(written / name, sync=True)
    manifest.write(written, files)
    for folder in (*(path for path in written.rglob("*") if path.is_dir()), written):
        storage.sync_directory(folder)
    replaced = final.with_suffix(DELETING)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    storage.sync_directory(final.parent)
    storage.sync_directory(final.parent.parent)  # for the first checkpoint the folder is new
    shutil.rmtree(replaced, ignore_errors=True)


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending."""
    return [step for path in complete(run_dir) if (step := step_of(path.name)) is not None]


def window_begins(run_dir: Path) -> int:
    """Return the step from which a run's log has all batches; 0 if none was deleted."""
    path = run_dir / FOLDER / WINDOW
    return int(path.read_text()) if path.exists() else 0


def begin_window(run_dir: Path, step: int) -> None:
    """Record that batches of steps before `step` may be deleted. The run has a checkpoint. Raises OSError."""
    if window_begins(run_dir) < step:
        storage.replace(run_dir / FOLDER / WINDOW, f"{step}\n".encode(), durable=True)


def next_bytes(run_dir: Path, disk: Path) -> int:
    """Return the bytes that the next checkpoint will take on the disk of `disk`: as many as the newest; 0 if it is being written already.

    Raises:
        OSError, DataError: a file cannot be read.
    """
    folder, path = run_dir / FOLDER, newest(run_dir)
    if path is None or any(folder.glob(f"*{WRITING}")) or folder.stat().st_dev != disk.stat().st_dev:
        return 0
    return sum(sealed.nbytes for sealed in manifest.read(path).values())


def prune(run_dir: Path, asked: Retention) -> None:
    """Delete complete checkpoints that are no longer kept; each is renamed first, so a half-deleted one does not count. Trainer and
    controller may call this at the same time."""
    steps = steps_of(run_dir)
    for step in set(steps) - asked.kept(steps, window_begins(run_dir)):
        path = directory(run_dir, step)
        deleting = path.with_suffix(DELETING)
        shutil.rmtree(deleting, ignore_errors=True)
        with suppress(FileNotFoundError):
            path.rename(deleting)
            shutil.rmtree(deleting)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that nothing resumes from it; return the new path. Only the user deletes it."""
    aside, number = checkpoint.with_suffix(DAMAGED), 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_suffix(f"{DAMAGED}-{number}")
    checkpoint.rename(aside)
    storage.sync_directory(checkpoint.parent)
    return aside
