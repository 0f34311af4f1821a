"""The curriculum's part of a checkpoint: `curriculum.npz`, arrays of NumPy and one JSON text, without pickle."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe import checkpoints, storage
from asyncmoe.errors import AsyncmoeError, DataError
from asyncmoe.rollout.tasks.curriculum import Curriculum, CurriculumState, PartState

log = logging.getLogger(__name__)
FILE = "curriculum.npz"
_FORMAT = 1
_BYTES_EACH, _BYTES_MORE = 9, 64 << 20
"""Bytes of an example, and of everything else: open groups, names and headers."""


def write(state: CurriculumState, directory: Path) -> None:
    """Write `FILE` into a directory.

    Raises:
        StorageError: it cannot be written.
    """
    arrays: dict[str, np.ndarray] = {}
    for number, part in enumerate(state.parts):
        arrays |= {f"counts{number}": part.counts, f"last{number}": part.last}
    told = {
        "format": _FORMAT,
        "next": state.next,
        "open": state.open,
        "sources": state.sources,
        "parts": [[part.turn, part.passed_over] for part in state.parts],
        "events": state.events,
    }
    arrays["told"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    path = directory / FILE
    with storage.writing("the curriculum's part of a checkpoint", path), path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes an array for allow_pickle
        file.flush()
        os.fsync(file.fileno())


def resume(curriculum: Curriculum, run_dir: Path) -> None:
    """Continue as the run's newest checkpoint says; begin anew if there is none, or if it was written with the curriculum off.

    Raises:
        DataError: as `read`.
    """
    newest = checkpoints.newest(run_dir)
    if newest is not None and not _restored(curriculum, newest):
        log.warning("%s was written without task.curriculum: the difficulty of prompts is measured from now on", newest.name)


def follow(curriculum: Curriculum, run_dir: Path, step: int) -> None:
    """Continue as the checkpoint of `step` says, which the trainer resumed from: it falls back to an older one if a file is damaged.

    Raises:
        DataError: as `read`.
        AsyncmoeError: the older checkpoint has no difficulties, and the one that `resume` read has; starting again works.
    """
    chosen = checkpoints.directory(run_dir, step)
    if chosen.is_dir() and not _restored(curriculum, chosen) and curriculum.state().next:
        raise AsyncmoeError(f"the trainer resumed from {chosen.name}, which has no {FILE}; start the same command again")


def _restored(curriculum: Curriculum, checkpoint: Path) -> bool:
    """Restore what a checkpoint has of the curriculum; false if it has nothing."""
    state = read(checkpoint, curriculum.sources, curriculum.sizes)
    if state is not None:
        curriculum.restore(state)
    return state is not None


def read(directory: Path, sources: Sequence[str], sizes: Sequence[int]) -> CurriculumState | None:
    """Read `FILE` of a checkpoint; None if it has none, because the curriculum was off.

    Args:
        sources: digests of the sources that the configuration names.
        sizes: number of examples of each.

    Raises:
        DataError: the file is damaged, or belongs to other prompts.
    """
    path = directory / FILE
    name = f"{directory.name}/{FILE}"
    hint = f"run.seed and the task's rows must be those of the run; or delete {path} to measure anew, or choose another run.dir"
    try:
        size = path.stat().st_size
        if size > _BYTES_EACH * sum(sizes) + _BYTES_MORE:
            raise DataError(name, got=f"{size} bytes", expected=f"the state of {sum(sizes)} prompts", hint=hint)
        with np.load(path, allow_pickle=False) as arrays:
            told = json.loads(arrays["told"].tobytes())
            if told["format"] != _FORMAT or tuple(told["sources"]) != tuple(sources):
                raise DataError(name, got="the difficulty of other prompts", expected="that of the task's", hint=hint)
            state = _state(told, arrays)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(name, got=got, expected="a file that this run wrote", hint=hint) from error
    for part, count in zip(state.parts, sizes, strict=True):
        if part.counts.shape != (count, 2) or part.last.shape != (count,):
            raise DataError(name, got=f"the state of {len(part.last)} prompts", expected=f"of {count}", hint=hint)
    return state


def _state(told: dict[str, Any], arrays: Any) -> CurriculumState:
    parts = tuple(
        PartState(int(turn), int(passed), arrays[f"counts{number}"].astype(np.float32), arrays[f"last{number}"].astype(np.uint8))
        for number, (turn, passed) in enumerate(told["parts"])
    )
    opened = tuple((int(group), int(part), int(index)) for group, part, index in told["open"])
    if any(not (0 <= part < len(parts) and 0 <= index < len(parts[part].last)) for _, part, index in opened):
        raise ValueError("an open group asks a prompt that does not exist")
    return CurriculumState(int(told["next"]), opened, tuple(told["sources"]), parts, int(told.get("events", 0)))
