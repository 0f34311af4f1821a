"""Copies a run's new checkpoints to its second place, in a thread of the supervisor, while the run continues."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from asyncmoe import storage
from asyncmoe.checkpoints import copies, directories
from asyncmoe.checkpoints.copies import KEY, SecondPlace
from asyncmoe.checkpoints.retention import Retention
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, WaitTimeout

T = TypeVar("T")
log = logging.getLogger(__name__)
_POLL_S, _JOIN_S = 1.0, 0.25
_ANSWER_S = 60.0
LAST_S = 900.0
"""Seconds that a run waits at its end for the copy of its last checkpoint."""


def check(config: Config) -> None:
    """Refuse a second place that does not respond, or that has copies although the run has no checkpoint.

    Raises:
        UserError: as `copies.place_of`; the place fails; or it has copies although the run has no checkpoint: they are another run's, or
            must be restored before the run starts.
    """
    url, run_dir = config.trainer.checkpoint_copy, config.run.dir
    if url is None:
        return
    place = copies.place_of(url, run_dir)
    steps = _answer(place, lambda: copies.complete(place), "a place that can be listed")
    if steps and directories.newest(run_dir) is None:
        hint = f"restore it by asyncmoe checkpoints {run_dir} --restore {place.shown.rpartition('/')[0]}, or name another place"
        expected = f"no copies, as {run_dir} has no checkpoint"
        raise ConfigError(KEY, got=f"{place.shown} with a copy of step {steps[-1]}", expected=expected, hint=hint)


def try_to_write(config: Config) -> None:
    """Refuse a second place that is not writable, by writing and deleting a file there.

    Raises:
        UserError: it is not writable.
    """
    if config.trainer.checkpoint_copy is not None:
        place = copies.place_of(config.trainer.checkpoint_copy, config.run.dir)
        _answer(place, lambda: copies.try_to_write(place), "a writable place")


def _answer(place: SecondPlace, act: Callable[[], T], expected: str) -> T:
    """Call the second place, waiting at most `_ANSWER_S`: its client may retry for minutes.

    Raises:
        ConfigError: it fails or does not respond.
    """
    try:
        return storage.within(_ANSWER_S, place.shown, "an answer", act)
    except Exception as error:
        why = f"no answer within {_ANSWER_S:.0f} s" if isinstance(error, WaitTimeout) else copies.said(error)
        raise ConfigError(KEY, got=f"{place.shown}: {why}", expected=expected) from error


class Copier:
    """Sends each new checkpoint, the newest first; one that is superseded meanwhile may be skipped. Use as a context manager.

    Failures are reported once until a copy succeeds, and never end the run. The end of the block waits up to `LAST_S` for the last
    checkpoint, unless the run has failed or the user ended it at once; the next start of the run then copies what is missing.

    Args:
        asked_to_end: returns how often the user has asked the run to end; one more request ends the wait for the last checkpoint.
    """

    def __init__(self, config: Config, asked_to_end: Callable[[], int] = lambda: 0) -> None:
        self._asked_to_end = asked_to_end
        self._kept, self._run_dir, url = Retention.of(config), config.run.dir, config.trainer.checkpoint_copy
        self._place = None if url is None else copies.place_of(url, self._run_dir)
        self._ending, self._now = threading.Event(), threading.Event()
        self._done: Path | None = None
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)

    def __enter__(self) -> Copier:
        if self._place is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._place is None:
            return
        if kind is not None:
            self._now.set()
        self._ending.set()
        if self._now.is_set():
            return
        begin, asked = time.monotonic(), self._asked_to_end()
        self._thread.join(_POLL_S)
        if self._thread.is_alive():
            _say(f"copying the last checkpoint to {self._place.shown} (Ctrl-C ends the run without this copy)")
        while self._thread.is_alive() and self._asked_to_end() == asked and time.monotonic() - begin < LAST_S:
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self._now.set()
            _say(f"{KEY}: the last checkpoint was not copied within {time.monotonic() - begin:.0f} s; the next start of the run copies it")

    def _work(self) -> None:
        assert self._place is not None
        while not self._now.is_set():
            last = self._ending.is_set()  # read before looking, so that the last checkpoint is not missed
            newest = directories.newest(self._run_dir)
            if newest is not None and newest != self._done:
                self._copy(newest, self._place)
                self._done = newest
            elif last:
                return
            else:
                self._ending.wait(_POLL_S)

    def _copy(self, checkpoint: Path, place: SecondPlace) -> None:
        begin = time.monotonic()
        try:
            copies.send(checkpoint, place)
            copies.prune(place, self._kept)
        except Exception as error:  # noqa: BLE001  every package has errors of its own; all are reported
            if checkpoint.is_dir() and not self._failing:  # else a newer one has replaced it
                why = f"{checkpoint.name} was not copied to {place.shown}: {copies.said(error)}"
                _say(f"{KEY}: {why}; the run goes on, and copies the next checkpoint")
            self._failing |= checkpoint.is_dir()
            return
        if self._failing:
            _say(f"{KEY}: {checkpoint.name} is copied to {place.shown}: copies succeed again")
        self._failing = False
        log.info("copied %s to %s in %.1f s", checkpoint.name, place.shown, time.monotonic() - begin)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
