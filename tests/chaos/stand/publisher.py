"""Publishes versions from a thread of rank 0, by the rules of `asyncmoe.weights.sender.reshard`: it meets the engines anew when they
changed, sends a version again if an engine was lost or if all that had received it are gone, and fails if nothing changed.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait

from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, WeightSyncError
from asyncmoe.rpc.client import Client
from asyncmoe.rpc.messages import Engines, EnginesAsk, WeightsAbort, WeightsCommit, WeightsJoin, WeightsStage
from tests.chaos.stand.exchange import Meeting

log = logging.getLogger(__name__)
_LOOK_S, _GRACE_S = 0.3, 5.0


class Publisher:
    """One version at a time: `begin`, then `settled`.

    Args:
        client: not shared.
        ranks: of the trainer.
    """

    def __init__(self, config: Config, client: Client, ranks: int) -> None:
        self._config, self._client, self._ranks = config, client, ranks
        self._meeting: Meeting | None = None
        self._roster, self._updates = 0, 0
        self._settling, self._running = threading.Event(), None

    _running: Future[None] | None

    def begin(self, version: int, parts: list[str]) -> None:
        """Start to publish a version, of which this is every rank's part."""
        self._settling.clear()
        result: Future[None] = Future()
        self._running = result

        def work() -> None:
            try:
                self._publish(version, parts)
                result.set_result(None)
            except Exception as error:  # noqa: BLE001  raised by `check` and `settled`
                result.set_exception(error)

        threading.Thread(target=work, name="weights", daemon=True).start()

    def check(self) -> None:
        """Raise the current version's error, if any, without waiting."""
        if self._running is not None and self._running.done():
            self._running.result()

    def settled(self, wait_s: float) -> bool:
        """Wait until all engines serve the current version; return whether they do, or there is none."""
        if self._running is not None:
            self._settling.set()
            if not wait([self._running], wait_s).done:
                return False
            running, self._running = self._running, None
            running.result()
        return True

    def _publish(self, version: int, parts: list[str]) -> None:
        while True:
            engines = self._engines()
            if engines.awaited:
                time.sleep(_LOOK_S)
                continue
            if not engines.engines:
                raise WeightSyncError("no engine is left")
            try:
                if self._meeting is None or engines.roster != self._roster:
                    self._meet(engines)
                self._send(version, parts)
            except (AsyncmoeError, OSError, ValueError) as error:
                self._disperse()
                if not self._others():
                    raise WeightSyncError(str(error)) from error
                log.warning("engines changed during version %d; sending it again: %s", version, error)
                continue
            while not self._settling.wait(_LOOK_S):
                now = self._engines().engines
                if now and all(engine.waiting for engine in now):
                    break
            else:
                return

    def _meet(self, engines: Engines) -> None:
        self._disperse()
        self._roster, self._updates = engines.roster, 0
        self._meeting = Meeting()
        group = f"weights-{engines.roster}"
        self._ask(WeightsJoin("127.0.0.1", self._meeting.port, group, "gloo", "reshard", self._ranks))
        self._meeting.wait(sum(engine.tp for engine in engines.engines), self._config.sync.timeout_s)

    def _send(self, version: int, parts: list[str]) -> None:
        self._updates += 1
        self._ask(WeightsStage(version))
        try:
            self._meeting.send(self._updates, version, parts)
            expected = ({f"part.{index}": part for index, part in enumerate(parts)},) if self._verifies(version) else ()
            self._ask(WeightsCommit(version, expected, self._updates))
        except (AsyncmoeError, OSError, ValueError) as error:
            self._ask(WeightsAbort(version, str(error) or type(error).__name__))
            raise

    def _verifies(self, version: int) -> bool:
        every = self._config.sync.verify_every
        return every > 0 and version % every == 0

    def _others(self) -> bool:
        section = self._config.cluster
        until = time.monotonic() + section.heartbeat_timeout_s + _GRACE_S
        while (now := self._engines()).roster == self._roster and not now.lost and time.monotonic() < until:
            time.sleep(0.1)
        return now.roster != self._roster or bool(now.lost)

    def _engines(self) -> Engines:
        wait_s = self._config.engines.start_timeout_s  # the next controller may be starting them
        return self._client.ask(EnginesAsk(wait_s), wait_s + self._config.sync.timeout_s + _GRACE_S)[0]  # type: ignore[return-value]

    def _disperse(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = None

    def _ask(self, request: object) -> None:
        self._client.ask(request, self._config.sync.timeout_s + _GRACE_S)  # type: ignore[arg-type]
