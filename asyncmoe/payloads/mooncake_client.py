"""Mooncake's client: its error numbers as answers or errors, and a time limit on what waits.

Only `setup` and `close` of the package hold Python's lock while they wait; its own limits, in environment variables, bound them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from asyncmoe.config.queue import MooncakeSection
from asyncmoe.errors import ConfigError, StorageError
from asyncmoe.payloads.mooncake_layout import OBJECT_BYTES, StoredRange

T = TypeVar("T")
log = logging.getLogger(__name__)
FULL = -200
"""No segment has room."""
_ABSENT = -704
_AWAY = (-900, -901)
"""The master was not reached, or did not answer in time."""
_AGAIN = (*_AWAY, -1010, -703, -707, -714)
"""Also: it is starting, the object is being written or moved, the reader's lease ended before the transfer did."""
_UNTOUCHED = (*_AGAIN, _ABSENT, -600, -702)
"""After these nothing is still being written to the reader's memory."""
_STAGING_BYTES = 8 * OBJECT_BYTES
"""What a process puts is copied there first: one object of each of the groups that it puts at once, and room to spare."""
_INDEXES = 16
"""Indexes that are read at once."""
_MOST_KEPT = 32
_LIMITS = {
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_STORE_CLIENT_METRIC": "0",
    "GLOG_minloglevel": "2",
}
"""Environment variables that the package reads when it is loaded, where the user has not set them."""
_KEPT: list[npt.NDArray[np.uint8]] = []
"""Buffers of reads that failed while a transfer may have been going on, which may still write there: kept until the process ends."""


class MooncakeClient:
    """For any thread.

    Args:
        store: a `MooncakeDistributedStore` that is set up.
        pinned: a `ReplicateConfig` under which the store drops nothing.
        master: its address.
        patience_s: seconds for which it is asked again.
    """

    def __init__(self, store: Any, pinned: Any, master: str, patience_s: float) -> None:
        self._store, self._pinned = store, pinned
        self.master, self.patience_s = master, patience_s
        self._closed = threading.Event()

    @classmethod
    def open(cls, section: MooncakeSection, segment_bytes: int, *, patient: bool) -> MooncakeClient:
        """Connect to the master, and give the store memory. Blocks.

        Args:
            patient: wait for a master that cannot be reached.

        Raises:
            ConfigError: the package cannot be used, or the master cannot be reached.
        """
        assert section.master is not None
        made, pinned = _package()
        until = time.monotonic() + (section.patience_s if patient else 0.0)
        while isinstance(host := _address_for(section.master), OSError):
            if time.monotonic() >= until:
                raise _unreachable(section.master, host.strerror or str(host))
            time.sleep(0.2)
        code = made.setup(host, section.metadata, segment_bytes, _STAGING_BYTES, section.protocol, "", section.master)
        if code != 0:
            raise _unreachable(section.master, f"Mooncake's error {code} on setup (GLOG_minloglevel=0 has it say more)")
        return cls(made, pinned, section.master, section.patience_s)

    def probe(self) -> None:
        """Put, read and remove a few bytes. Raises ConfigError: the store has no memory, or cannot be used; StorageError."""
        key, data = f"asyncmoe:probe:{uuid.uuid4().hex}", os.urandom(64)
        code = self.put(key, [memoryview(data)])
        try:
            found = bytes(self.read([StoredRange(key, 0, 0, len(data))], len(data))[0].data) if code == 0 else b""
        finally:
            self.remove([key])
        if code == FULL:
            hint = "set queue.mooncake.segment_bytes, or start mooncake_client on nodes that have memory to give"
            raise ConfigError("queue.mooncake", got=f"a store at {self.master} without room", expected="one with memory", hint=hint)
        if found != data:
            got = f"a store at {self.master} that does not return what was put (Mooncake's error {code})"
            raise ConfigError("queue.mooncake", got=got, expected="one that does", hint="docs/guides/payloads.md")

    def put(self, key: str, parts: Sequence[memoryview]) -> int:
        """Put an object that the store may not drop; one that is there stays as it is. Returns 0, or an error number of Mooncake.

        Raises:
            StorageError: the master does not answer.
        """
        code: int = self._ask(lambda: self._store.put_parts(key, *parts, config=self._pinned), lambda code: code)
        return code

    def all_there(self, keys: Sequence[str]) -> bool:
        """Return whether objects are there, whole. Raises as `put`."""
        return all(one == 1 for one in self._ask(lambda: self._store.batch_is_exist(list(keys)), min))

    def small(self, keys: Sequence[str]) -> list[bytes | str]:
        """Read whole objects that are small; of one that cannot be read, return why. Raises as `put`."""
        found = list[bytes | str]()
        for first in range(0, len(keys), _INDEXES):
            some = list(keys[first : first + _INDEXES])
            data: list[bytes] = self._limited(lambda some=some: self._store.get_batch(some))  # type: ignore[misc]
            data += [b""] * (len(some) - len(data))
            found += [one or self._small(key) for key, one in zip(some, data, strict=True)]
        return found

    def read(self, wanted: Sequence[StoredRange], nbytes: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """Read ranges into a new buffer of `nbytes`. Returns it and of each range its length, or an error number of Mooncake.

        Raises as `put`.
        """
        keys = list(dict.fromkeys(one.key for one in wanted))
        by_key = {key: [n for n, one in enumerate(wanted) if one.key == key] for key in keys}

        def request() -> tuple[npt.NDArray[np.uint8], list[int]]:
            if len(_KEPT) >= _MOST_KEPT:
                raise StorageError(f"payloads: {_MOST_KEPT} transfers from Mooncake have failed half way; no more are begun")
            buffer = np.empty(nbytes, np.uint8)
            codes, pointer = [-800] * len(wanted), buffer.ctypes.data
            if (code := self._store.register_buffer(pointer, nbytes)) != 0:
                raise StorageError(f"payloads: Mooncake cannot use {nbytes} bytes of memory (its error {code})")
            try:
                fields = ([[getattr(wanted[n], name) for n in by_key[key]] for key in keys] for name in ("target", "source", "nbytes"))
                targets, sources, sizes = fields
                answer = self._store.get_into_ranges([pointer], [keys], [targets], [sources], [sizes])
                for key, found in zip(keys, answer[0] if answer else (), strict=False):
                    for n, code in zip(by_key[key], found, strict=False):
                        codes[n] = code
            finally:
                if all(code >= 0 or code in _UNTOUCHED for code in codes):
                    self._store.unregister_buffer(pointer)
                else:
                    _KEPT.append(buffer)
            return buffer, codes

        if not wanted:
            return np.empty(0, np.uint8), []
        return self._ask(request, lambda answer: min(answer[1]))

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also such as are being read; those that are not there, too. Raises as `put`."""
        if keys:
            self._ask(lambda: self._store.batch_remove(list(keys), True), min)

    def remove_matching(self, pattern: str) -> int:
        """Remove all objects whose keys a regular expression finds; return their number. The master looks at all its keys."""
        code: int = self._ask(lambda: self._store.remove_by_regex(pattern, True), lambda code: code)
        if code < 0:
            raise StorageError(f"payloads: Mooncake at {self.master} removed nothing: its error {code}")
        return code

    def look(self) -> None:
        """Raise StorageError if the master does not answer."""
        self._ask(lambda: self._store.get_size("asyncmoe:none"), lambda code: code)

    def close(self) -> None:
        """End all waiting, and leave the store with what memory was given to it."""
        if not self._closed.is_set():
            self._closed.set()
            self._store.close()

    def _small(self, key: str) -> bytes | str:
        """Read one object alone: the package does not say why it returns nothing."""
        code = self._ask(lambda: self._store.get_size(key), lambda code: code)
        data: bytes = self._limited(lambda: self._store.get(key)) if code > 0 else b""
        return data or ("nothing" if code in (0, _ABSENT) else f"Mooncake's error {code}" if code < 0 else f"none of its {code} bytes")

    def _ask(self, request: Callable[[], T], number: Callable[[T], int]) -> T:
        """Send a request, again while the master does not answer; `number` finds the error number in an answer."""
        until, pause_s = time.monotonic() + self.patience_s, 0.05
        while True:
            answer = self._limited(request)
            if (code := number(answer)) not in _AGAIN:
                return answer
            if time.monotonic() >= until or self._closed.is_set():
                if code in _AWAY:
                    raise self._away()
                return answer
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _limited(self, request: Callable[[], T]) -> T:
        """Return what a request returns, if it does so in time; it goes on otherwise, with what it refers to."""
        if self._closed.is_set():
            raise StorageError("payloads: the connection to Mooncake is closed")
        future = Future[T]()

        def work() -> None:
            try:
                future.set_result(request())
            except BaseException as error:  # noqa: BLE001  passed to who waits for it
                future.set_exception(error)

        threading.Thread(target=work, name="mooncake", daemon=True).start()
        try:
            return future.result(self.patience_s)
        except TimeoutError as error:
            raise self._away() from error

    def _away(self) -> StorageError:
        hint = "bring the master back; the journal has what was finished"
        return StorageError(f"payloads: Mooncake at {self.master} did not answer for {self.patience_s:g} s; {hint}")


def _package() -> tuple[Any, Any]:
    """Return a store that is not set up, and the settings under which it drops nothing. Raises ConfigError: the package cannot be used."""
    for name, value in _LIMITS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as error:
        hint = "install libibverbs (libibverbs1 of Debian), which it loads without RDMA too" if "libibverbs" in str(error) else None
        raise ConfigError("queue.payloads=mooncake", got=str(error), expected="a package that loads", hint=hint) from error
    pinned = ReplicateConfig()
    if not hasattr(pinned, "with_hard_pin") or not hasattr(MooncakeDistributedStore, "get_into_ranges"):
        got = "a package without hard pins or reads of ranges"
        hint = "a full store would drop what is not yet trained"
        raise ConfigError("queue.payloads=mooncake", got=got, expected="mooncake-transfer-engine-non-cuda 0.3.13 or later", hint=hint)
    pinned.with_hard_pin = True
    return MooncakeDistributedStore(), pinned


def _address_for(master: str) -> str | OSError:
    """Return this machine's address on the way to the master, by which the store's other clients find it; or why there is no way."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 2.0) as one:
            return str(one.getsockname()[0])
    except OSError as error:
        return error


def _unreachable(master: str, got: str) -> ConfigError:
    hint = "start mooncake_master, or name another one; queue.payloads=workers needs none"
    return ConfigError("queue.mooncake.master", got=f"{master}: {got}", expected="a master that answers", hint=hint)
