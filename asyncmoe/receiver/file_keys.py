"""The keys of a meeting as small files of a version store, for ranks that reach nothing else together.

A file does not say whether the process that set it still runs: who waits here is bounded by time, and by what its controller tells it.
Some places show a file while it is written: a file begins with the digest of its value, and until that fits the key is not set.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from asyncmoe.errors import ProtocolError
from asyncmoe.version_store import StoreFiles, open_files
from asyncmoe.version_store.manifest import digest_of

FOLDER = "meetings"
KEY = "sync.store.url"
_MOST_BYTES = 64 << 20
_DIGEST_BYTES = 64
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


def folder_of(url: str, token: str) -> str:
    """Return the URL of the folder with the keys of a meeting.

    Args:
        url: of the version store; a directory may be given as a path.
        token: unique name of the meeting.
    """
    return f"{'' if '://' in url else 'file://'}{url.rstrip('/')}/{FOLDER}/{token}"


class FileKeys:
    """What `asyncmoe.receiver.control_store.Store` needs of torch's stores, for one thread at a time. A value once seen is final.

    Args:
        url: `folder_of` the meeting.
        timeout_s: bound of every call but `wait`.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._files: StoreFiles = open_files(url, KEY, timeout_s, durable=False)  # after a power cut there is no meeting
        self._seen: dict[str, bytes] = {}
        self._next, self._pause = 0.0, _SHORTEST_PAUSE_S

    def set(self, name: str, value: bytes) -> None:
        self._files.write(name, digest_of(value).encode() + value)

    def get(self, name: str) -> bytes:
        if self._value(name) is None:
            raise dist.DistStoreError(f"{name} is not set")
        return self._seen[name]

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        return [self.get(name) for name in names]

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all are set. Looks less often the longer they are not."""
        missing = [name for name in names if name not in self._seen]
        if missing:
            time.sleep(max(0.0, self._next - time.monotonic()))
            found = all(self._value(name) is not None for name in missing)
            self._pause = _SHORTEST_PAUSE_S if found else min(_LONGEST_PAUSE_S, 1.25 * self._pause)
            self._next = time.monotonic() + self._pause
            return found
        return True

    def wait(self, names: Sequence[str], limit: timedelta) -> None:
        """Return when all are set; raise DistStoreError if they are not in time."""
        until = time.monotonic() + limit.total_seconds()
        self._next = 0.0
        while not self.check(names):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{', '.join(names)} not set within {limit.total_seconds():g} s")

    def delete_key(self, name: str) -> None:
        self._seen.pop(name, None)
        self._files.delete(name)

    def _value(self, name: str) -> bytes | None:
        if name not in self._seen and (data := self._files.read(name, 0, _MOST_BYTES + 1)) is not None:
            if len(data) > _MOST_BYTES:
                raise ProtocolError(f"{name} of a meeting in {self._files.shown}: got more than {_MOST_BYTES} bytes")
            value = data[_DIGEST_BYTES:]
            if data[:_DIGEST_BYTES] == digest_of(value).encode():
                self._seen[name] = value
        return self._seen.get(name)
