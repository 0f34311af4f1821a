"""Gives alerts to a command, from a thread: slow or failing, it holds up nothing, and a failure is said once."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from asyncmoe.telemetry.alerts import Alert

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
        self._sender, self._sent = ThreadPoolExecutor(1, "alerts"), list[Future[None]]()
        self._failed = False

    def send(self, alert: Alert) -> None:
        """Send an alert; returns at once."""
        if self._command is not None:
            body = {"run": self._run, "event": alert.event, "text": alert.text, "step": alert.step, "time": time.time()}
            self._sent.append(self._sender.submit(self._call, self._command, json.dumps(body).encode()))

    def close(self) -> None:
        """Wait for the alerts that are not sent yet, for at most twice the time of one: for the one under way, and the last."""
        wait(self._sent, 2 * _TIMEOUT_S)
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _call(self, command: Sequence[str], body: bytes) -> None:
        try:
            done = subprocess.run(command, input=body, capture_output=True, timeout=_TIMEOUT_S, check=False, start_new_session=True)
        except (OSError, subprocess.SubprocessError) as error:
            self._fail(str(error))
            return
        if done.returncode:
            self._fail(f"status {done.returncode}: {done.stderr[-300:].decode(errors='replace').strip()}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"an alert was not sent, and later failures are not said: watch.alerts.command: {why}")
