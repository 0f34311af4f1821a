"""The controller of a run on this machine, as often as it is started."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.launch.prepared import LocalStarter
from asyncmoe.process import Child
from asyncmoe.rpc.environment import KEEPER


def local_controller(config: Config, file: Path) -> LocalStarter:
    """Return its starter. `file`: the configuration that it reads."""
    command = [sys.executable, "-m", "asyncmoe", "rollout", str(file)]
    log, keeper = config.run.dir / "logs" / "controller.log", {KEEPER: "1" if config.keeps_engines else ""}
    return LocalStarter(config.run.dir, lambda more: Child("controller", command, log, {**keeper, **more}, config.telemetry.logs.bounds))
