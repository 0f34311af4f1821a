"""Gives alerts to a command, from a thread: slow or failing, it holds up nothing, and a failure is said once."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from asyncmoe.telemetry.alerts import Alert

_MOST_WAITING = 100
_TIMEOUT_S = 10.0
"""Seconds that the command may take for one alert."""


class Alarm:
    """Gives the alerts of one run to `watch.alerts.command`.

    Args:
        command: program and arguments; None: alerts go nowhere.
        run: name of the run.
        say: called, from another thread, with the first failure.
    """

    def __init__(self, command: Sequence[str] | None, run: str, say: Callable[[str], None]) -> None:
        self._command, self._run, self._say = command, run, say
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._failed = False
        self._thread: threading.Thread | None = None

    def send(self, alert: Alert) -> None:
        """Send an alert; returns at once."""
        if self._command is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._command,), name="alerts", daemon=True)
            self._thread.start()
        body = {"run": self._run, "event": alert.event, "text": alert.text, "step": alert.step, "time": time.time()}
        try:
            self._waiting.put_nowait(json.dumps(body).encode())
        except queue.Full:
            self._fail(f"more than {_MOST_WAITING} wait to be sent")

    def close(self) -> None:
        """Wait for the alerts that are not sent yet, for at most twice the time of one: for the one under way, and the last."""
        if self._thread is None:
            return
        until = time.monotonic() + 2 * _TIMEOUT_S
        try:
            self._waiting.put(None, timeout=_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, until - time.monotonic()))

    def _work(self, command: Sequence[str]) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                done = subprocess.run(command, input=body, capture_output=True, timeout=_TIMEOUT_S, check=False, start_new_session=True)
            except (OSError, subprocess.SubprocessError) as error:
                self._fail(str(error))
                continue
            if done.returncode:
                self._fail(f"status {done.returncode}: {done.stderr[-300:].decode(errors='replace').strip()}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"an alert was not sent, and later failures are not said: watch.alerts.command: {why}")
