"""Checkpoint directories: `RUN/checkpoints/step-00000012/`, either complete or absent.

A checkpoint is written under a temporary name and renamed once every rank has written its part, so a kill at any moment
leaves the previous checkpoint usable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe.errors import DataError

_PREFIX = "step-"
_WRITING = ".writing"
_FACTS = "asyncmoe.json"


def directory(run_dir: Path, step: int) -> Path:
    """Return the final directory of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"{_PREFIX}{step:08d}"


def newest(run_dir: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None."""
    complete = [path for path in (run_dir / "checkpoints").glob(f"{_PREFIX}*") if (path / _FACTS).is_file() and not path.suffix]
    return max(complete, default=None)


def temporary(run_dir: Path, step: int) -> Path:
    """Return the directory that holds the checkpoint of `step` until it is complete."""
    return directory(run_dir, step).with_suffix(_WRITING)


def start(run_dir: Path, step: int) -> None:
    """Create an empty temporary directory for `step`; delete the remains of killed saves."""
    give_up(run_dir)
    temporary(run_dir, step).mkdir(parents=True)


def give_up(run_dir: Path) -> None:
    """Delete incomplete checkpoints."""
    for half in (run_dir / "checkpoints").glob(f"{_PREFIX}*{_WRITING}"):
        shutil.rmtree(half, ignore_errors=True)


def finish(run_dir: Path, step: int, facts: dict[str, Any], keep: int) -> Path:
    """Make the checkpoint of `step` visible and delete all but the newest `keep`."""
    final = directory(run_dir, step)
    written = temporary(run_dir, step)
    (written / _FACTS).write_text(json.dumps(facts, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    written.rename(final)
    complete = sorted(path for path in final.parent.glob(f"{_PREFIX}*") if not path.suffix)
    for old in complete[:-keep]:
        shutil.rmtree(old)
    return final


def facts(checkpoint: Path) -> dict[str, Any]:
    """Read the facts that `finish` stored with a checkpoint.

    Raises:
        DataError: the file of facts is missing or malformed.
    """
    try:
        values = json.loads((checkpoint / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise DataError(str(checkpoint), got=str(error), expected=f"a checkpoint with {_FACTS}") from error
    if not isinstance(values, dict) or "step" not in values:
        raise DataError(str(checkpoint / _FACTS), got=str(values)[:80], expected="a mapping with the key step")
    return values


def check_family(checkpoint: Path, family: str) -> None:
    """Refuse a checkpoint that another model family made; checkpoints of before families were recorded are accepted.

    Args:
        family: name of the run's family, which is a `model_type`.

    Raises:
        DataError: another family made it, or as `facts`.
    """
    made = facts(checkpoint).get("family", family)
    if made != family:
        hint = "set model.family as in the run that made it, or choose another run.dir"
        raise DataError(f"{checkpoint.name}: model family", got=made, expected=f"{family}, as the configuration says", hint=hint)


def check_kind(checkpoint: Path, now: Mapping[str, Any], *, recorded: bool = False) -> None:
    """Refuse a checkpoint whose optimizer state another kind of training wrote.

    Args:
        now: settings that the names in a checkpoint depend on, as `finish` stored those of the run that wrote it.
        recorded: compare only settings that the checkpoint has; otherwise one that it lacks differs.

    Raises:
        DataError: one of them differs, or as `facts`.
    """
    saved = facts(checkpoint)
    for key, value in now.items():
        if saved.get(key) != value and not (recorded and key not in saved):
            raise DataError(
                f"{checkpoint.name}: optimizer state",
                got=f"{key} = {saved.get(key)}",
                expected=f"{key} = {value}, as the configuration says",
                hint=_REMEDIES.get((key, saved.get(key))) if key != "lora" else None,
            )


_ELSEWHERE = "or choose another run.dir"
_REMEDIES: Mapping[tuple[str, object], str] = {
    ("distributed_optimizer", True): "set trainer.optimizer.distributed to true",
    ("distributed_optimizer", False): "set trainer.optimizer.distributed to false",
    ("expert_parallel", True): f"set trainer.ep above 1, as when the run began, {_ELSEWHERE}",
    ("expert_parallel", False): f"set trainer.ep to 1, as when the run began, {_ELSEWHERE}",
}
