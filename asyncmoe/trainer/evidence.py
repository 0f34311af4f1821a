"""Evidence of an anomaly that stops a run: RUN/evidence/step-N, which only its owner can read.

anomaly.json    the broken rules, the values of the batch and of earlier steps
config.json     the whole configuration
items.json      what the controller said of each trajectory of the batch
batch-R.npz     rank R's part of the batch, in NumPy's format without pickle: for each trajectory I of items.json, arrays "I/tokens",
                "I/loss_mask", "I/logprobs" and "I/versions" as in `asyncmoe.trajectory.Trajectory`
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asyncmoe.config import Config
from asyncmoe.rpc.item import Item
from asyncmoe.storage import writing
from asyncmoe.trainer.anomalies import Anomaly, History
from asyncmoe.trajectory import Trajectory
from asyncmoe.trajectory.trajectory import ARRAYS

FOLDER = "evidence"


def folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the evidence of a step."""
    return run_dir / FOLDER / f"step-{step}"


def write_facts(
    config: Config, step: int, items: Sequence[Item], findings: Sequence[Anomaly], values: Mapping[str, float], history: History
) -> None:
    """Write all but the arrays.

    Raises:
        StorageError: a file cannot be written.
    """
    facts = {"step": step, "findings": findings, "values": values, "history": history}
    for name, content in (("anomaly", facts), ("items", items), ("config", config.model_dump(mode="json"))):
        _write(folder(config.run.dir, step) / f"{name}.json", msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def write_arrays(run_dir: Path, step: int, rank: int, trajectories: Mapping[int, Trajectory]) -> None:
    """Write one rank's trajectories, by position in the batch.

    Raises:
        StorageError: the file cannot be written.
    """
    arrays = {f"{i}/{name}": getattr(t, name) for i, t in trajectories.items() for name in ARRAYS}
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    _write(folder(run_dir, step) / f"batch-{rank}.npz", packed.getvalue())


def _write(path: Path, content: bytes) -> None:
    with writing("evidence of an anomaly", path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # An earlier start of the run may have left a file of the same step.
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
