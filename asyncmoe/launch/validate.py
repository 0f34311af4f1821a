"""Check a configuration as a run would, without starting or writing anything."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.config.devices import counted
from asyncmoe.launch import local
from asyncmoe.models import hub, make
from asyncmoe.rollout import parts


def validate(config: Config) -> str:
    """Check everything that can be checked before a run starts: sizes, the model and its files, the engines' Python, checkpoints, and the
    user's own code, tasks and data, which are imported, read and tried as before a run. Return a one-line description of the run.

    Only the headers of weights are read, and no weights are downloaded: for a model on the hub that is not in the cache, the other files
    are fetched and then deleted.

    Raises:
        UserError: what would stop the run.
    """
    with tempfile.TemporaryDirectory(prefix="asyncmoe-validate-") as scratch:
        config, download = hub.described(config, Path(scratch, "described"))
        local.check(config, weights=download is None)
        parts.run(parts.load_and_check(_with_tokenizer(config, Path(scratch))))
    engines = f"{counted(config.engines.count, 'engine')} of {config.engines.tp} rank(s)"
    size = f"{config.run.steps} steps of {config.rollout.batch} trajectories, {config.trainer.ranks} trainer rank(s), {engines}"
    return f"{size}; {download}" if download else size


def _with_tokenizer(config: Config, scratch: Path) -> Config:
    """Return a configuration whose model has a tokenizer: for a model not made yet, only its tokenizer is made, in `scratch`."""
    made = config.model.make
    if made is None or not make.to_make(config.model, config.run.dir):
        return config
    (scratch / "config.json").write_text(json.dumps(make.settings(made)))
    make.write_tokenizer(scratch, made.context)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": scratch})})
