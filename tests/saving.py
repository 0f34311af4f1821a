"""Runs of a small model that save checkpoints, as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe import checkpoints
from asyncmoe.config import Config, parse
from asyncmoe.config.model import MadeModel
from asyncmoe.models.make import make_model
from asyncmoe.trainer.model.checkpoint_saver import Saver


def small(path: Path, **trainer: Any) -> Config:
    """The configuration of a run in `path`, whose model is made there."""
    make_model(path / "model", MadeModel(), seed=0)
    run = {"run": {"dir": str(path / "run"), "steps": 1}, "model": {"path": str(path / "model")}, "task": {"kind": "arithmetic"}}
    return parse({**run, "trainer": trainer})


def save(config: Config, step: int, built: Any, adam: Any) -> Path:
    """Save the state as the checkpoint of `step`, and return its directory. Collective over all ranks."""
    saver = Saver(config, built, adam)
    saver.save(step)
    saver.settle()
    return checkpoints.directory(config.run.dir, step)
