"""The key-value store of the weight protocol, hosted by the trainer's rank 0, and process groups made through it.

In a run on one machine the store is a file that no other user can reach, otherwise a server (torch's `TCPStore`, without authentication).
Receivers poll it for the next update without using a process group, and notice at once if the trainer ends. The keys and messages are in
`asyncmoe.weights.protocol`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncmoe.errors import WaitTimeout, WeightSyncError
from asyncmoe.platform.file_store import open_store
from asyncmoe.rpc.address import LOOPBACK, towards
from asyncmoe.weights.protocol import ELSEWHERE, FAILED, Key, Outcome, T, Terms, passing, sent, staged, update_failed
from asyncmoe.weights.receiver.hosting import Hosted, is_held

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.025
"""Bounds on the polling interval in seconds: short for quick updates, and long enough to cost nothing during a long step."""
_WATCH_S = 1.0
_LOOK_S = 0.2
"""Seconds between checks that the file's host lives; a check costs more than the rest of a poll."""
_FILE_S = 1.0
"""Seconds that a FileStore waits for its file, which exists unless its host has ended meanwhile."""
_LAST_WORDS_S = 0.5
"""Seconds to wait for other ranks' reports after one has failed: they may contain the root cause."""
_c10d: Any = distributed_c10d
R = TypeVar("R")


class StoreGone(WeightSyncError):
    """The trainer's rank 0 has ended or closed the store."""


class Store:
    """The store with typed values, for one thread at a time.

    Args:
        rank: this process's rank in the meeting.
        host, port: address at which rank 0 hosts the store; or a path and 0 (`hosting.place`).
        hosted: on rank 0, what `hosting.host` returned; the store takes ownership.

    Raises:
        WeightSyncError: rank 0 does not host a store there.
    """

    def __init__(self, group: str, rank: int, host: str, port: int, timeout_s: float, hosted: Hosted | None = None) -> None:
        self.rank, self._group, self._hosted = rank, group, hosted
        self._file = Path(host) if host.startswith("/") else None
        self._looked = 0.0
        self._peer = "the trainer's rank 0" if self._file else f"the trainer's rank 0 at {host}:{port}"
        self._at = host, port
        c10d: Any = dist
        limit = timedelta(seconds=timeout_s)
        mine: dict[str, Any] = {"is_master": True, "master_listen_fd": hosted.detach()} if isinstance(hosted, socket.socket) else {}
        try:
            if self._file is None:
                store = c10d.TCPStore(host, port, timeout=limit, wait_for_workers=False, **mine)
            elif is_held(self._file):
                store = open_store(self._file)
                store.set_timeout(timedelta(seconds=_FILE_S))
            else:
                raise WeightSyncError(f"{self._peer}: no process hosts the store {host}")
        except RuntimeError as error:
            raise WeightSyncError(f"{self._peer}: {_first_line(error)}") from error
        self._store: Any = _c10d.PrefixStore(group, store)

    def put(self, key: Key[T], value: T) -> None:
        """Set a value. Raise StoreGone if rank 0 is gone."""
        self._ask(lambda: self._store.set(key.name, msgspec.msgpack.encode(value)))

    def get(self, key: Key[T], timeout_s: float) -> T:
        """Wait for a value.

        Raises:
            WaitTimeout: it was not set in time.
            StoreGone: rank 0 is gone.
        """
        if self._file is None:
            self._ask(lambda: self._store.wait([key.name], timedelta(seconds=max(0.001, timeout_s))), key.name)
        else:
            self._wait_in_file(self._file, key, timeout_s)
        return msgspec.msgpack.decode(self._ask(lambda: self._store.get(key.name), key.name), type=key.type)

    def _wait_in_file(self, file: Path, key: Key[Any], timeout_s: float) -> None:
        """Wait for a value as `get` does. A FileStore's own wait does not notice that its host is gone."""
        begin, seen = time.monotonic(), -1
        while True:
            self._look()
            # Poll the file's length, which is cheap: every change makes the file longer. At exit the interpreter can end a daemon thread
            # that polls; a thread inside torch's code would abort the process.
            size = file.stat().st_size if file.exists() else 0
            if size != seen and self.has(key):
                return
            seen = size
            if (waited := time.monotonic() - begin) > timeout_s:
                raise WaitTimeout(self._peer, key.name, waited)
            _pause(waited)

    def get_all(
        self, keys: Mapping[Key[T], str], timeout_s: float, failed: Key[Outcome] = FAILED, watch: Callable[[], None] = lambda: None
    ) -> dict[Key[T], T]:
        """Wait for several values. If `failed` or `FAILED` is set first, wait briefly for the rest, then return the values that are set.

        Args:
            keys: maps each key to the name of the rank that sets it, for the error.
            watch: called every second while waiting; raises if waiting is futile.

        Raises:
            WaitTimeout: names the ranks that have not set a value.
            StoreGone: rank 0 is gone.
        """
        began = time.monotonic()
        until, some_failed, look = began + timeout_s, False, began + _WATCH_S
        every = list(keys)
        # One request per poll for any number of keys. The server's `wait` would need no polling, but prints to stderr when it times out.
        while not (complete := self._have(every)):
            now = time.monotonic()
            if now > until:
                break
            if now > look:
                watch()
                look = time.monotonic() + _WATCH_S
            if not some_failed and (self.has(failed) or self.has(FAILED)):
                some_failed, until = True, now + _LAST_WORDS_S
            _pause(now - began)
        missing = {} if complete else {key: whom for key, whom in keys.items() if not self.has(key)}
        if missing and not some_failed:
            raise WaitTimeout(", ".join(missing.values()), next(iter(missing)).name, timeout_s)
        return self._values([key for key in every if key not in missing])

    def _values(self, keys: list[Key[T]]) -> dict[Key[T], T]:
        """Return the values of keys, all of which are set."""
        found = self._ask(lambda: self._store.multi_get([key.name for key in keys])) if keys else []
        return {key: msgspec.msgpack.decode(value, type=key.type) for key, value in zip(keys, found, strict=True)}

    def fail(self, update: int, key: Key[Outcome], why: str, doubtful: bool = False) -> None:
        """Report that this rank's part of an update failed."""
        self.put(key, Outcome(why, doubtful))
        self.put(update_failed(update), Outcome())

    def resign(self, update: int, why: str) -> None:
        """Report that this rank leaves the meeting and takes no further part in any channel or in `update`."""
        self.put(FAILED, Outcome(why))
        for key in (sent(update, self.rank), staged(update, self.rank)):
            self.fail(update, key, why)

    def resigned(self) -> str:
        """Return why a rank has resigned; empty if none has."""
        return self.get(FAILED, 1.0).failure if self.has(FAILED) else ""

    def check_failed(self, *keys: Key[Outcome]) -> None:
        """Raise WeightSyncError if a rank has set one of `keys` or has resigned."""
        if any(self.has(key) for key in (FAILED, *keys)):
            raise WeightSyncError(ELSEWHERE)

    def forget(self, update: int, terms: Terms) -> None:
        """Delete the keys of an update that every rank has finished."""
        for key in passing(update, terms):
            self._store.delete_key(key.name)

    def connect(self, world: int, epoch: int, timeout_s: float) -> dist.ProcessGroup:
        """Make the process group of channel `epoch` with all ranks; return when all have joined.

        It is not registered with torch: neither the trainer's nor SGLang's default group knows its ranks.

        Raises:
            WaitTimeout: the other ranks did not join in time.
            WeightSyncError: joining failed before the timeout, because a rank that had joined is gone.
        """
        began = time.monotonic()
        gloo = _c10d.ProcessGroupGloo
        try:
            store = _c10d.PrefixStore(f"group{epoch}", self._store)
            options = gloo._Options()
            # Gloo's default is the interface of the host's name, which other machines often cannot reach.
            options._devices = [gloo.create_device(hostname=LOOPBACK if self._file else towards(*self._at))]
            options._timeout = timedelta(seconds=timeout_s)
            group: dist.ProcessGroup = gloo(store, self.rank, world, options)
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited < timeout_s:
                raise WeightSyncError(f"rank {self.rank}: joining weight group {self._group}: {_first_line(error)}") from error
            raise WaitTimeout("the other ranks", f"to join weight group {self._group} ({_first_line(error)})", waited) from error
        return group

    def has(self, key: Key[Any]) -> bool:
        """Return whether a key is set. Raise StoreGone if rank 0 is gone."""
        return self._have([key])

    def _have(self, keys: Sequence[Key[Any]]) -> bool:
        """Return whether all keys are set."""
        return not keys or bool(self._ask(lambda: self._store.check([key.name for key in keys])))

    def _ask(self, call: Callable[[], R], what: str = "an answer of the store") -> R:
        """Call the store. Raise WaitTimeout if it timed out, StoreGone if rank 0 is gone."""
        self._look()
        begin = time.monotonic()
        try:
            return call()
        except dist.DistStoreError as error:
            raise WaitTimeout(self._peer, what, time.monotonic() - begin) from error
        except RuntimeError as error:
            raise StoreGone(f"{self._peer} is gone: {_first_line(error)}") from error

    def _look(self) -> None:
        """Raise StoreGone if the file's host is gone."""
        if self._file is not None and time.monotonic() > self._looked + _LOOK_S:
            if not is_held(self._file):
                raise StoreGone(f"{self._peer} is gone")
            self._looked = time.monotonic()


def _pause(waited_s: float) -> None:
    time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, waited_s / 32)))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
