"""A small model in this process, and checkpoints of it as a run saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe import checkpoints
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.models import load_hf_config
from asyncmoe.models.make import make_model
from asyncmoe.trainer.model import gpt, mesh
from asyncmoe.trainer.model.checkpoint_saver import Saver
from tests.configs import minimal


def small(path: Path, shape: MadeModel | None = None, **trainer: Any) -> Config:
    """The configuration of a run in `path`, whose model is made there."""
    make_model(path / "model", shape or MadeModel(), seed=0)
    return minimal(path / "run", path / "model", trainer=trainer)


def built(config: Config) -> gpt.Model:
    """The model of a configuration with its weights, on a mesh that this starts."""
    path = Path(config.model.path)
    made = gpt.build(load_hf_config(path), config, mesh.start(config.trainer))
    gpt.load_hf(made, path)
    return made


def save(config: Config, step: int, model: gpt.Model, adam: Any) -> Path:
    """Save the state as the checkpoint of `step`, and return its directory. Collective over all ranks."""
    saver = Saver(config, model, adam)
    saver.save(step)
    saver.settle()
    return checkpoints.directory(config.run.dir, step)
