"""Finds the checkpoint of an iteration among those that Megatron-LM or Megatron-Bridge has saved.

Source: `get_checkpoint_name` and `read_metadata` of Megatron-LM's training/checkpointing.py; `CheckpointingConfig` of megatron/core 0.16.1
(dist_checkpointing/core.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from asyncmoe.errors import DataError
from asyncmoe.platform.megatron.reader import METADATA_FILE

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FORMAT_FILE = "metadata.json"
FORMAT = "torch_dist"
_EXPECTED = f"a {FORMAT} checkpoint of Megatron-LM or Megatron-Bridge"
_CONVERT = "convert it with Megatron-LM, which loads it with its arguments and --ckpt-convert-format torch_dist --ckpt-convert-save OUT"


def find(checkpoint: Path, iteration: int | None = None) -> Path:
    """Return the folder of an iteration.

    Args:
        checkpoint: it, or the folder that Megatron saved to (`--save`).
        iteration: its number; None: the one that Megatron would load.

    Raises:
        DataError: there is none, it is of another format, or is not whole.
    """
    if not checkpoint.is_dir():
        raise DataError(str(checkpoint), got="no such directory" if not checkpoint.exists() else "a file", expected=_EXPECTED)
    if _is_one(checkpoint):
        if iteration is not None:
            raise DataError("--iteration", got=f"{iteration} with {checkpoint}, which is one iteration", expected="the folder above it")
        found = checkpoint
    else:
        found = _of_iteration(checkpoint, iteration)
    _check_format(found)
    return found


def _is_one(folder: Path) -> bool:
    return any((folder / name).exists() for name in (FORMAT_FILE, METADATA_FILE)) or bool(_legacy(folder))


def _legacy(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("mp_rank_*"))


def _of_iteration(root: Path, iteration: int | None) -> Path:
    there = {path.name: path for path in (*sorted(root.glob("iter_*")), root / RELEASE) if path.is_dir()}
    listed = ", ".join(there) if len(there) <= 20 else f"{next(iter(there))} to {list(there)[-1]}"
    if iteration is not None:
        name, what, why = f"iter_{iteration:07d}", "--iteration", str(iteration)
    else:
        tracker = root / TRACKER
        if not tracker.is_file():
            hint = f"name one: --iteration N, of {listed}" if there else None
            raise DataError(str(root), got=f"no {TRACKER}", expected=_EXPECTED, hint=hint)
        word = tracker.read_text(errors="replace").strip()[:80]
        if word != RELEASE and not (word.isascii() and word.isdigit()):
            raise DataError(str(tracker), got=repr(word), expected=f"the number of an iteration, or {RELEASE}")
        name, what, why = (word if word == RELEASE else f"iter_{int(word):07d}"), str(tracker), word
    if name not in there:
        raise DataError(
            what,
            got=f"{why}, and there is no {root / name}",
            expected=f"an iteration that is there: {listed}" if there else "an iteration that is there, but there is none",
            hint="name one with --iteration N" if there and iteration is None else None,
        )
    return there[name]


def _check_format(folder: Path) -> None:
    """Refuse other formats, and checkpoints whose saving was cut off: Megatron and torch write these two files last."""
    if legacy := _legacy(folder):
        raise DataError(str(folder), got=f"{legacy[0]}, of Megatron's legacy format (torch)", expected=_EXPECTED, hint=_CONVERT)
    path = folder / FORMAT_FILE
    whole = "it may be half written: take an earlier iteration with --iteration N, if there is one"
    if not path.is_file():
        raise DataError(str(folder), got=f"no {FORMAT_FILE}", expected=_EXPECTED, hint=whole)
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(str(path), got=f"{type(error).__name__}: {error}"[:200], expected='"sharded_backend"', hint=whole) from error
    if backend != FORMAT:
        raise DataError(str(folder), got=f"format {backend!r}"[:100], expected=_EXPECTED, hint=_CONVERT)
    if not (folder / METADATA_FILE).is_file():
        raise DataError(str(folder), got=f"no {METADATA_FILE}", expected=_EXPECTED, hint=whole)
