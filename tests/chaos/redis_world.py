"""The same faults in a run whose log is in Redis: a real server, which is killed and stopped too."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from asyncmoe.errors import AsyncmoeError
from asyncmoe.log import belonging
from asyncmoe.queue import records
from asyncmoe.queue.fold import LogState, fold
from tests.chaos.schedule import KINDS, Kind, Moment
from tests.chaos.world import World
from tests.redis_server import LocalRedis

_OTHERS = {kind: drawn for kind, drawn in KINDS.items() if kind != "full disk"}
REDIS: dict[Kind, tuple[float, tuple[str, ...]]] = _OTHERS | {
    "kill": (12.0, (*KINDS["kill"][1], *["redis"] * 5)),
    "stop": (4.0, (*KINDS["stop"][1], "redis")),
    "damage": (1.0, ("checkpoint", "rendezvous.json", "log.json")),
}
"""Kinds and targets here: the log has no files. On a full disk the run goes on, but without samples, which alone tell the groups that were
dropped."""


class RedisWorld(World):
    """See `World`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.server: LocalRedis = LocalRedis(self.folder / "redis")
        self._run = ""

    def configuration(self) -> dict[str, Any]:
        made = super().configuration()
        return made | {"log": made["log"] | {"redis": self.server.url}}

    def __exit__(self, *stopped: object) -> None:
        self.server.close()
        super().__exit__(*stopped)

    def pids(self) -> dict[str, int]:
        return super().pids() | {"redis": self.server.pid}

    def log_state(self) -> LogState:
        from asyncmoe.log import redis

        self.serve_log()
        key = self._stream("0")
        with self.server.client() as client:
            found = [(int(name.partition(b"-")[0]), fields.get(b"r")) for name, fields in client.xrange(key)]
        read = [(at, redis.opened(key, at, data)) for at, data in found]
        return fold((at, records.entry(data, "the log")) for at, data in read if data is not None)

    def sign(self, moment: Moment) -> object:
        if moment not in ("payload", "change"):
            return super().sign(moment)
        from redis import RedisError

        with suppress(RedisError), self.server.client(socket_timeout=1.0) as client:
            return client.xinfo_stream(self._stream("1" if moment == "payload" else "0"))["last-generated-id"]
        return None

    def _stream(self, writer: str) -> str:
        with suppress(AsyncmoeError):  # damaged
            known = belonging.read(self.run_dir)
            self._run = self._run if known is None else known.run
        return f"asyncmoe:{self._run}:{writer}"
