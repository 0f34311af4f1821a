"""The next start of a part of a run, prepared while the part runs: a process that stands by (`asyncmoe.rpc.stand_by`)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process
from asyncmoe.process import Child
from asyncmoe.rpc import stand_by
from asyncmoe.rpc.environment import STAND_BY, TRAINER_EPOCH

log = logging.getLogger(__name__)
_MOST_LOST = 3
_FILES = ".stand-by-*"


def clear(run_dir: Path) -> None:
    """Remove what a launcher of this run has left that was killed."""
    for file in run_dir.glob(_FILES):
        file.unlink(missing_ok=True)


class Prepared:
    """The next start, if there is one.

    Args:
        run_dir: where the file is made with which the process goes on.
        start: starts the process with variables added to its environment.
    """

    def __init__(self, run_dir: Path, start: Callable[[Mapping[str, str]], Child]) -> None:
        self._run_dir, self._start = run_dir, start
        self._child: Child | None = None
        self._file: Path | None = None
        self._lost = 0

    def prepare(self) -> None:
        """Start the process, unless it stands by. One that ends or cannot be started is tried again a few times; the run goes on."""
        if self._child is not None and self._child.returncode is not None:
            self._lost += 1
            log.warning("the next start was lost while it stood by: %s", self._child.why())
            self._child = None
        if self._child is None and self._lost < _MOST_LOST:
            self._forget()
            self._file = self._run_dir / _FILES.replace("*", secrets.token_hex(8))
            try:
                self._child = self._start({STAND_BY: str(self._file.absolute())})
            except AsyncmoeError as error:
                self._lost += 1
                log.warning("the next start cannot be prepared: %s", error)

    def take(self, epoch: int) -> Child | None:
        """Have the process go on, and return it; None if none stands by.

        Raises:
            StorageError: the file cannot be written.
        """
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return None
        assert self._file is not None
        stand_by.go_on(self._file, epoch)
        return child

    def end(self, grace_s: float) -> None:
        """End the process that stands by."""
        self._forget()
        if self._child is not None:
            self._child.end(grace_s)

    def _forget(self) -> None:
        """Remove the file of the last process that went on, which has long read it."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class LocalStarter:
    """A `Starter` for this machine, of a part with one process. All starts append to one log.

    Args:
        start: as for `Prepared`.
    """

    def __init__(self, run_dir: Path, start: Callable[[Mapping[str, str]], Child]) -> None:
        self._run_dir, self._start, self._next = run_dir, start, Prepared(run_dir, start)
        self._child: Child | None = None

    def start(self, epoch: int) -> tuple[Process, ...]:
        """Start it, or have the one that stands by go on.

        Raises:
            StorageError: the log cannot be opened.
            AsyncmoeError: the system cannot start the process.
        """
        self._child = self._next.take(epoch) or self._start({TRAINER_EPOCH: str(epoch)})
        return (self._child,)

    def prepare(self) -> None:
        """Start the next one, which stands by, unless one does."""
        self._next.prepare()

    def end(self, grace_s: float = 0.0) -> None:
        """End it, after `grace_s` by SIGKILL: another takes its place, and one that hangs or is stopped must not wake up beside it."""
        if self._child is not None:
            self._child.end(grace_s)

    def stop(self) -> None:
        """Ask it to end, and the one that stands by, and kill what does not in time."""
        self._next.end(STOP_GRACE_S)
        self.end(STOP_GRACE_S)
