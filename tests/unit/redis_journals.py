"""Journals in a real Redis server, by the run directory that they belong to, for the tests of journals in folders to run on."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncmoe.config.journal import JournalSection
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.journal import Journal
from tests.redis_server import LocalRedis, LossyLink
from tests.unit.test_journal import OF, Life


@dataclass
class RedisJournals:
    """Every run directory has a database of the server."""

    server: LocalRedis
    link: LossyLink | None = None
    up: threading.Lock = field(default_factory=threading.Lock)
    """Held while the server is down."""
    databases: dict[Path, int] = field(default_factory=dict)

    def number(self, folder: Path) -> int:
        """The database of a run directory."""
        return self.databases.setdefault(folder, len(self.databases))

    def section(self, folder: Path, **more: Any) -> JournalSection:
        """The configuration of a run directory's journal."""
        socket = self.server.socket if self.link is None else self.link.socket
        return JournalSection(redis=f"unix://{socket}?db={self.number(folder)}", **{"redis_patience_s": 20.0, **more})

    def opened(self, folder: Path, of: Mapping[str, str] = OF, max_bytes: int = 1 << 24) -> Journal:
        """As `tests.unit.test_journal.opened`."""
        from asyncmoe.journal.in_redis import opening

        folder.mkdir(parents=True, exist_ok=True)
        return opening.open_journal(self.section(folder, max_bytes=max_bytes, segment_bytes=1 << 12), Belonging.of_run(folder, of))

    def kill(self, life: Life, folder: Path, to: Path) -> Path:
        """As `tests.unit.test_journal.kill`: what a kill leaves, beside a run that goes on."""
        life.journal._states.read(lambda connection: None)
        shutil.copytree(folder, to)
        with self.up:
            self.copy(folder, to)
        return to

    def copy(self, folder: Path, to: Path) -> None:
        """Copy all keys at one moment, without the connection of who holds them."""
        with self.server.client(self.number(folder)) as client:
            pipeline = client.pipeline(transaction=True)
            for key in client.keys("*"):
                pipeline.copy(key, key, self.number(to))
            pipeline.execute()
        with self.server.client(self.number(to)) as client:
            for key in client.keys("*:state"):
                client.hdel(key, "client")

    def killed_and_restarted(self, draw: random.Random, until: threading.Event) -> int:
        """Kill the server at random moments and start it again, until told to stop; return how often."""
        kills = 0
        while not until.wait(draw.uniform(0.05, 0.5)):
            with self.up:
                self.server.kill()
                self.server.start()
            kills += 1
        return kills
