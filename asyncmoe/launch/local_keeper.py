"""The keeper of a run's engines on this machine: started, or taken over from a launcher that was lost."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.errors import ProtocolError, WaitTimeout
from asyncmoe.launch.run_processes import STOP_GRACE_S
from asyncmoe.process import Child, wait_until
from asyncmoe.rollout.engines import kept
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.keeper_messages import KeeperEnd, KeeperTake
from asyncmoe.rpc.rendezvous import Rendezvous
from asyncmoe.telemetry import processes
from asyncmoe.telemetry.heartbeats import TRAINER

_ANSWER_S = 30.0


class LocalKeeper:
    """The keeper as the launcher ends it.

    Attributes:
        process: as it is supervised.
    """

    def __init__(self, config: Config, file: Path) -> None:
        """Take over the keeper that a lost launcher of the same run has left, or start one.

        Raises:
            StorageError: the log cannot be opened.
            AsyncmoeError: the system cannot start the process, or a keeper of another configuration does not end.
        """
        log = config.run.dir / "logs" / "keeper.log"
        self.process: Child | Adopted
        left = kept.running(config.run.dir)
        if left is not None and taken(left, config):
            self.process = Adopted(processes.of("keeper", left.pid, config.run.dir), log)
        else:
            command = [sys.executable, "-m", "asyncmoe.launch.keep", str(file), str(os.getpid())]
            self.process = Child("keeper", command, log, bounds=config.telemetry.logs.bounds, outlives=True)

    def end(self) -> None:
        """Ask it to end with all engines, and kill it if it does not in time; engines end with it."""
        self.process.end(STOP_GRACE_S)


class Adopted:
    """A keeper that another process started. Its exit status is unknown: it counts as 0, and the controller notices the loss of engines."""

    name, reason = "keeper", None

    def __init__(self, process: processes.Recorded, log: Path) -> None:
        self.log, self._process = log, process

    @property
    def returncode(self) -> int | None:
        """None while it runs, then 0."""
        return None if processes.runs(self._process) else 0

    def why(self) -> str:
        """Say that it has ended."""
        return f"the keeper of engines has ended; its log is {self.log}"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it ended in time."""
        return wait_until(lambda: self.returncode is not None, seconds)

    def end(self, grace_s: float) -> None:
        """Send it SIGTERM, and SIGKILL after `grace_s`."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace_s):
            self.signal(signal.SIGKILL)
            self.wait(grace_s)


def taken(left: Rendezvous, config: Config) -> bool:
    """Take over a keeper; one whose engines have another configuration is ended instead. Return whether it was taken over.

    Raises:
        AsyncmoeError: it does not answer, or does not end.
    """
    with Client(left, "supervisor", peer="the keeper of engines") as client:
        try:
            client.ask(KeeperTake(config.digest, os.getpid()), _ANSWER_S)
        except ProtocolError:
            client.ask(KeeperEnd(0), _ANSWER_S)
        else:
            return True
    if not wait_until(lambda: kept.running(config.run.dir) is None, STOP_GRACE_S):
        raise WaitTimeout("the keeper of engines", f"its end; process {left.pid}", STOP_GRACE_S)
    return False


def wait_for_left(run_dir: Path) -> None:
    """Wait, for a while, until the controller and the ranks of a launcher that was lost have ended: each gets SIGTERM with its launcher."""
    recorded = processes.read(run_dir)
    if any(processes.runs(one) for one in recorded if one.role == "supervisor"):
        return
    left = [one for one in recorded if one.role == "controller" or one.role.startswith(TRAINER)]
    wait_until(lambda: not any(processes.runs(one) for one in left), STOP_GRACE_S)
