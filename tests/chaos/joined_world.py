"""The same run with engines that join it: two `asyncmoe engine` commands, which a site starts again whenever they end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

from tests.chaos.schedule import KINDS, Kind
from tests.chaos.world import World, configuration
from tests.system.runs import MARK, REPOSITORY

JOINERS = ("joiner.0", "joiner.1")
JOINED: dict[Kind, tuple[float, tuple[str, ...]]] = {
    kind: (share, (*targets, *(JOINERS if kind in ("kill", "stop", "hang") else ()))) for kind, (share, targets) in KINDS.items()
}
"""Kinds and targets here."""
HEARTBEAT_S = 6.0


class JoinedWorld(World):
    """See `World`."""

    keeps_engines = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._joiners: dict[int, subprocess.Popen[bytes]] = {}

    def configuration(self) -> dict[str, Any]:
        return configuration(self.folder, self.seed, join=True) | {"cluster": {"heartbeat_timeout_s": HEARTBEAT_S}}

    def tend(self) -> None:
        if not self.running:
            return
        assert self.command is not None
        environment = {**os.environ, **self._environment, MARK: self.command.mark}
        for index in range(2):
            if index in self._joiners and self._joiners[index].poll() is None:
                continue
            arguments = ["engine", str(self.folder / "config.yaml"), "--index", str(index), "--name", f"engine.{index}"]
            with (self.folder / f"joiner-{index}.txt").open("ab") as log:
                command = [sys.executable, "-m", "asyncmoe", *arguments]
                self._joiners[index] = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)

    def untend(self) -> None:
        """Without a controller they would wait for the next one, for engines.start_timeout_s."""
        for joiner in self._joiners.values():
            joiner.terminate()
        for joiner in self._joiners.values():
            with suppress(subprocess.TimeoutExpired):  # whoever looks for processes that are left finds it
                joiner.wait(30.0)
        self._joiners.clear()
