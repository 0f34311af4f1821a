"""Check a configuration as a run would, without starting or writing anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.config.devices import counted
from asyncmoe.errors import Faults, UserError
from asyncmoe.launch import local
from asyncmoe.models import hub


def validate(config: Config, *known: UserError) -> str:
    """Check everything that can be checked before a run starts: sizes, the model and its files, the engines' Python, checkpoints, and the
    user's own code, tasks and data, which are imported, read and tried as before a run. Return a one-line description of the run.

    Only the headers of weights are read, and no weights are downloaded: for a model on the hub that is not in the cache, the other files
    are fetched and then deleted.

    Args:
        known: errors that are raised with those found here.

    Raises:
        UserError: everything that would stop the run, a line each.
    """
    faults = Faults(*known)
    with tempfile.TemporaryDirectory(prefix="asyncmoe-validate-") as scratch:
        described = faults.of(hub.described, config, Path(scratch, "described"))
        if described is None:
            faults.refuse()
        config, download = described or (config, None)
        local.check(config, *faults.found, weights=download is None, whole=True)
    engines = f"{counted(config.engines.count, 'engine')} of {config.engines.tp} rank(s)"
    size = f"{config.run.steps} steps of {config.rollout.batch} trajectories, {config.trainer.ranks} trainer rank(s), {engines}"
    return f"{size}; {download}" if download else size
