"""Sends alerts to a webhook or a command, from a thread: slow or failing, they hold up nothing, and a failure is said once."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from asyncmoe.config.watch import AlertsSection
from asyncmoe.errors import ConfigError
from asyncmoe.surroundings import proxy_for
from asyncmoe.telemetry.alerts import Alert

_MOST_WAITING = 100
_VARIABLE = "env:"


class Alarm:
    """Sends the alerts of one run.

    Args:
        run: name of the run.
        say: called, from another thread, with the first failure to send.

    Raises:
        ConfigError: the webhook's environment variable is not set.
    """

    def __init__(self, section: AlertsSection, run: str, say: Callable[[str], None]) -> None:
        self._section, self._run, self._say = section, run, say
        self._webhook = _address(section.webhook)
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._failed = False
        self._thread: threading.Thread | None = None

    def send(self, alert: Alert) -> None:
        """Send an alert if its event is to be told; returns at once."""
        if alert.event not in self._section.on or (self._webhook is None and self._section.command is None):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()
        body = {"run": self._run, "event": alert.event, "text": alert.text, "step": alert.step, "time": time.time()}
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            self._fail(f"more than {_MOST_WAITING} wait to be sent")

    def close(self) -> None:
        """Wait for the alerts that are not sent yet, at most twice `timeout_s`: for the one under way, and the last."""
        if self._thread is None:
            return
        until = time.monotonic() + 2 * self._section.timeout_s
        try:
            self._waiting.put(None, timeout=self._section.timeout_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (body := self._waiting.get()) is not None:
            text = json.dumps(body).encode()
            for name, send in (("webhook", self._post), ("command", self._call)):
                try:
                    send(text)
                except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
                    self._fail(f"watch.alerts.{name}: {_in_words(error)}")

    def _post(self, body: bytes) -> None:
        if self._webhook is None:
            return
        request = urllib.request.Request(self._webhook, body, {"Content-Type": "application/json"}, method="POST")
        proxies = {} if (proxy := proxy_for(self._webhook)) is None else {urlsplit(self._webhook).scheme: proxy}
        opener = urllib.request.build_opener(_Refuse, urllib.request.ProxyHandler(proxies))
        opener.open(request, timeout=self._section.timeout_s).close()

    def _call(self, body: bytes) -> None:
        if self._section.command is None:
            return
        done = subprocess.run(
            self._section.command,
            input=body,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=self._section.timeout_s,
            check=False,
            start_new_session=True,
        )
        if done.returncode:
            raise subprocess.SubprocessError(f"status {done.returncode}: {done.stderr[-300:].decode(errors='replace').strip()}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"an alert was not sent, and later failures are not said: {why}")


def _in_words(error: Exception) -> str:
    """Name an error without the webhook's address, which may be a secret and is in some texts."""
    if isinstance(error, subprocess.SubprocessError | urllib.error.HTTPError):
        return str(error)
    reason = getattr(error, "reason", error)
    return f"{type(reason).__name__} {getattr(reason, 'strerror', None) or ''}".strip()


class _Refuse(urllib.request.HTTPRedirectHandler):
    """Answers a redirect with its error: an alert goes where the configuration says."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Mapping[str, str], newurl: str) -> None:  # type: ignore[override]
        return None


def _address(webhook: str | None) -> str | None:
    if webhook is None or not webhook.startswith(_VARIABLE):
        return webhook
    name = webhook.removeprefix(_VARIABLE)
    found = os.environ.get(name, "")
    if not found.startswith(("http://", "https://")):
        got = "no such environment variable" if name not in os.environ else "a value that is no http address"
        raise ConfigError("watch.alerts.webhook", got=f"{webhook}: {got}", expected=f"an address in {name}")
    return found
