"""Keys of a meeting as files, in a place that shows a file while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from asyncmoe.receiver.file_keys import FileKeys, folder_of


class Shown(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Shows a file from when it is opened, and then every byte, as sftp does."""

    protocol = "shown"
    cachable = False
    look: ClassVar[Callable[[], None]]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        for nbytes in range(len(value) + 1):
            super().pipe_file(path, value[:nbytes])
            Shown.look()


@pytest.fixture
def place() -> Iterator[str]:
    fsspec.register_implementation("shown", Shown, clobber=True)
    Shown.look = lambda: None
    yield folder_of("shown://place", "token")
    MemoryFileSystem.store.clear()


def value_of(keys: FileKeys, name: str) -> bytes | None:
    try:
        return keys.get(name)
    except dist.DistStoreError:
        return None


def test_half_a_value_is_none(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks meanwhile sees nothing, and then the value, whatever it is."""
    mine, theirs, seen, name = FileKeys(place, 10.0), FileKeys(place, 10.0), list[bytes | None](), ""
    monkeypatch.setattr(Shown, "look", lambda: seen.append(value_of(theirs, name)))
    for name, value in (("a", b"terms of a meeting"), ("b", b""), ("c", bytes(40))):
        seen.clear()
        mine.set(name, value)
        assert len(seen) > len(value)
        assert seen == [None] * (len(seen) - 1) + [value]
    assert theirs.multi_get(["a", "b", "c"]) == [b"terms of a meeting", b"", bytes(40)]
