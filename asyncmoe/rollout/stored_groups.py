"""The store of payloads (queue.payloads) as the controller has it: it knows which groups are needed, and deletes the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from asyncmoe import storage
from asyncmoe.config import Config
from asyncmoe.errors import AsyncmoeError, DataError, StorageError
from asyncmoe.payloads.opening import open_store
from asyncmoe.payloads.store import GroupStore
from asyncmoe.payloads.writer import GroupWriter
from asyncmoe.queue.group_buffer import Group

log = logging.getLogger(__name__)
MARKER = "payloads.json"
"""File in the run directory with the name of the run in its store."""
_LOOK_S = 0.1
_AGAIN_S = 1.0
"""After a failure."""
_LOOKS_A_SWEEP = 50


class StoredGroups:
    """For the controller's event loop.

    Args:
        prefix: how the names of this controller's groups begin.
    """

    def __init__(self, store: GroupStore, prefix: str) -> None:
        self.prefix, self._store, self._writer = prefix, store, GroupWriter(store, prefix)
        self._live: set[str] = set()
        self._over: list[str] = []
        self._failing = False

    @classmethod
    def open(cls, config: Config) -> StoredGroups | None:
        """Connect to the store of a run, if it has one, and delete what an earlier controller has left there. Blocks.

        Raises:
            DataError: the run's name in the store cannot be read.
            UserError, StorageError: as `asyncmoe.payloads.opening.open_store`.
        """
        if (store := open_store(config.queue, writes=True)) is None:
            return None
        try:
            return cls(store, store.begin(run_name(config.run.dir)))
        except BaseException:
            store.close()
            raise

    async def keep(self, group: Group) -> Group:
        """Return a group that is to be queued, whose trajectories lie in the store now. Raises as `GroupStore.put`."""
        if not group.stored:
            group = await self._writer.put(group)
        self._live.add(group.stored)
        return group

    def over(self, groups: Sequence[Group]) -> None:
        """Have groups deleted."""
        names = {group.stored for group in groups} - {""}
        self._live -= names
        self._over += names

    async def run(self) -> None:
        """Delete groups that are over, and look after the store; never returns.

        A store that does not answer is asked again: only who has something to put needs it.

        Raises:
            UserError: it may have begun to drop what it holds, or refuses the user.
        """
        looks = 0
        while True:
            await asyncio.sleep(_AGAIN_S if self._failing else _LOOK_S)
            looks += 1
            try:
                await self._look(sweep=self._failing or looks % _LOOKS_A_SWEEP == 0)
                self._failing = False
            except StorageError as error:
                if not self._failing:
                    log.warning("what is over stays in the store until it answers: %s", error)
                self._failing = True
            except AsyncmoeError:
                self._failing = True
                raise

    async def _look(self, sweep: bool) -> None:
        if over := tuple(self._over):
            await asyncio.to_thread(self._store.delete, over)
            del self._over[: len(over)]
        if sweep and (left := await asyncio.to_thread(self._store.sweep, self.prefix, frozenset(self._live))):
            log.warning("payloads: %d groups that a lost process left are deleted", left)

    async def close(self) -> None:
        """Delete all groups of the run; what is not trained is in its journal."""
        try:
            if not await asyncio.to_thread(self._writer.end):
                log.warning("payloads: a group is still being put; what there is of it stays in the store until the run's next start")
            if not self._failing:
                await asyncio.to_thread(self._store.clear, self.prefix)
        except AsyncmoeError as error:
            log.warning("payloads: the run's groups stay in the store until its next start: %s", error)
        finally:
            await asyncio.to_thread(self._writer.close)


def run_name(run_dir: Path) -> str:
    """Return the name of a run in its store, from a file that is written once; a copy of the folder is another run.

    Raises:
        DataError: it is damaged.
        StorageError: it cannot be written.
    """
    path = run_dir / MARKER
    # Not the device: on a network file system its number depends on the node and on the order of mounts.
    inode = run_dir.stat().st_ino
    try:
        found = json.loads(path.read_text())
        name, of = found["run"], found["inode"]
        if not (isinstance(name, str) and name.isascii() and name.isalnum() and isinstance(of, int)):
            raise ValueError(f"the name {name!r} of folder {of!r}")
        if of == inode:
            return name
        log.warning(
            "payloads: %s is of another folder, of which this one is a copy; this run has a name of its own. If the folder was moved from "
            "another file system, what asyncmoe:%s:* still has in the store can be deleted",
            path,
            name,
        )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(str(path), got=str(error), expected="the name of the run in its store", hint="delete it") from error
    name = uuid.uuid4().hex[:16]
    with storage.writing("the name of the run in its store", path):
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({"run": name, "inode": inode}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return name
