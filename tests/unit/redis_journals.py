"""Journals in a real Redis server, by the run directory that they belong to, for the tests of journals in folders to run on."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from asyncmoe.config.journal import JournalSection
from asyncmoe.errors import AsyncmoeError
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.journal import Journal
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.replays import Resumption
from asyncmoe.queue.start_order import Start
from tests.redis_server import LocalRedis, LossyLink
from tests.unit.test_journal import BATCH, OF, SIZE, Life
from tests.unit.test_queue_model import make_group


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
        if self.link is not None:
            Belonging.of_run(folder, of).note(begun=True)  # a run that goes on waits for a server that does not answer
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


async def work(section: JournalSection, folder: Path, seed: int) -> None:
    """Go on with a run until the process is killed: groups from 4 tasks, leases, commits and checkpoints; say what was acknowledged."""
    from asyncmoe.journal.in_redis import opening

    journal = opening.open_journal(section, Belonging.of_run(folder, OF))
    step = journal.recorded.first or 0
    found = journal.begin(step, 0, BATCH, 0)
    groups = await journal.groups([group.number for group in found.queued])
    resumed = Resumption(found.accounts, groups, found.starts, found.arrivals, journal)
    queue = BoundedQueue(
        capacity=1 << 20, batch=BATCH, group_size=SIZE, max_staleness=1 << 20, trained_steps=step, journal=journal, resumed=resumed
    )
    starts = chain(queue.take_requeued(), map(Start, count(found.next)))
    draw = random.Random(seed)

    async def sample() -> None:
        for start in starts:
            queue.started(SIZE)
            journal.begun(start)
            await asyncio.sleep(draw.uniform(0, 0.01))
            await queue.put_group(make_group(start.number, SIZE, [0, 0]))
            print("queued", start.number, flush=True)

    async def train() -> None:
        for number in count(step):
            leased = await queue.lease(number, "rl", BATCH, number, 60.0)
            print("leased", number, *dict.fromkeys(item.group for item in leased.items), flush=True)
            queue.commit(number)
            queue.set_version(number + 1)
            if number % 4 == 3 and number - 3 > step:
                await journal.forget(number - 3)
                print("forgot", number - 3, flush=True)

    tasks = [asyncio.create_task(one) for one in (*(sample() for _ in range(4)), train())]
    await asyncio.gather(*tasks)


def main() -> None:
    """Run `work` in this process; end with one line if the journal fails."""
    try:
        asyncio.run(work(JournalSection.model_validate_json(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
    except AsyncmoeError as error:
        print(error, flush=True)
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
