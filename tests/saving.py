"""Saves a checkpoint, as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe import checkpoints
from asyncmoe.config import Config
from asyncmoe.trainer.model.checkpoint_saver import Saver


def save(config: Config, step: int, built: Any, adam: Any) -> Path:
    """Save the state as the checkpoint of `step`, and return its directory. Collective over all ranks."""
    saver = Saver(config, built, adam)
    saver.save(step)
    saver.settle()
    return checkpoints.directory(config.run.dir, step)
