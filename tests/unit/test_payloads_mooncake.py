"""Groups in Mooncake's store, without the package: where their bytes lie, what its error numbers become, and what is refused.

tests/integrations/test_mooncake.py has the package and its master.
"""

from __future__ import annotations

import ctypes
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.config.queue import QueueSection
from asyncmoe.errors import ConfigError, DataError, StorageError, UserError
from asyncmoe.payloads import mooncake_client, opening
from asyncmoe.payloads import mooncake_layout as layout
from asyncmoe.payloads.in_mooncake import MooncakeGroups
from asyncmoe.payloads.mooncake_client import MooncakeClient
from asyncmoe.payloads.packed import Asked
from asyncmoe.trajectory import encode, part
from tests.unit import test_packed
from tests.unit.test_config import refused, with_value
from tests.unit.test_packed import trajectory

KEYS = ("g0.e0", "g0.e1")
FRAMES = {key: encode(trajectory(20, seed, True, True)) for seed, key in enumerate(KEYS)}
RUN = "run1"


class FakeMooncake:
    """What `MooncakeDistributedStore` does with objects, in a dict, with the numbers that the package returns.

    Attributes:
        room: bytes that it takes; beyond them it refuses, as the package does with a hard pin.
        ahead: numbers that the next calls return instead of doing anything.
    """

    def __init__(self, room: int = 1 << 30) -> None:
        self.objects: dict[str, bytes] = {}
        self.room, self.ahead, self.put_log = room, list[int](), list[str]()
        self.registered: set[int] = set()

    def put_parts(self, key: str, *parts: memoryview, config: Any) -> int:
        assert config.with_hard_pin
        if self.ahead:
            return self.ahead.pop(0)
        data = b"".join(parts)
        if key not in self.objects and sum(map(len, self.objects.values())) + len(data) > self.room:
            return -200
        self.put_log.append(key)
        self.objects.setdefault(key, data)
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def get_batch(self, keys: list[str]) -> list[bytes]:
        return [b"" if self.ahead else self.objects.get(key, b"") for key in keys]

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def get_size(self, key: str) -> int:
        return self.ahead.pop(0) if self.ahead else len(self.objects[key]) if key in self.objects else -704

    def register_buffer(self, pointer: int, nbytes: int) -> int:
        self.registered.add(pointer)
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        self.registered.remove(pointer)
        return 0

    def get_into_ranges(self, pointers: list[int], keys: Any, targets: Any, sources: Any, sizes: Any) -> list[list[list[int]]]:
        found = list[list[int]]()
        for key, to, of, each in zip(keys[0], targets[0], sources[0], sizes[0], strict=True):
            found.append([self._range(key, pointers[0] + t, s, n) for t, s, n in zip(to, of, each, strict=True)])
        return [found]

    def _range(self, key: str, pointer: int, source: int, nbytes: int) -> int:
        if self.ahead:
            return self.ahead.pop(0)
        data = self.objects.get(key)
        if data is None or source + nbytes > len(data):
            return -704 if data is None else -600
        ctypes.memmove(pointer, data[source : source + nbytes], nbytes)
        return nbytes

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        return [0 if self.objects.pop(key, None) is not None else -704 for key in keys]

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        return len(self.batch_remove([key for key in self.objects if re.search(pattern, key)], force))

    def close(self) -> None: ...


def opened(fake: FakeMooncake, patience_s: float = 0.3, full_s: float = 5.0) -> MooncakeGroups:
    return MooncakeGroups(MooncakeClient(fake, SimpleNamespace(with_hard_pin=True), "host:1", patience_s), full_s)


@settings(max_examples=25, deadline=None)
@given(
    group=st.lists(test_packed.cases, min_size=1, max_size=3),
    kept=test_packed.layers,
    masks=st.booleans(),
    size=st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_what_is_read_of_a_group_is_what_part_sends_whatever_the_objects_size(group: Any, kept: Any, masks: bool, size: int) -> None:
    fake = FakeMooncake()
    store = opened(fake)
    frames = {f"g0.e{number}": encode(one) for number, one in enumerate(group)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "OBJECT_BYTES", size)
        store.put(name := f"{store.begin(RUN)}w.0", frames)
        assert max(len(data) for key, data in fake.objects.items() if not key.endswith(":index")) <= size
        asked = [Asked(name, key, kept if one.routes is not None else None, masks) for key, one in zip(frames, group, strict=True)]
        for each, found in zip(asked, store.get(asked), strict=True):
            assert not isinstance(found, DataError), found
            assert [bytes(one) for one in found] == [bytes(one) for one in part(frames[each.key], each.layers, masks)]
        assert not fake.registered
        store.delete([name])
    assert not fake.objects


def test_a_full_store_makes_a_group_wait_without_what_it_had_put_and_takes_it_once_there_is_room() -> None:
    fake = FakeMooncake()
    store = opened(fake)
    prefix = store.begin(RUN)
    store.put(f"{prefix}w.0", FRAMES)
    fake.room = sum(map(len, fake.objects.values())) + 200
    kept = dict(fake.objects)
    with pytest.raises(StorageError, match=r"payloads: Mooncake at host:1 is full; nothing was freed for 5 s .*lower queue\.capacity"):
        store.put(f"{prefix}w.1", FRAMES, until=0.0)
    assert fake.objects == kept
    threading.Timer(0.1, store.delete, [[f"{prefix}w.0"]]).start()
    store.put(f"{prefix}w.1", FRAMES)
    assert {key.rpartition(":")[0] for key in fake.objects} == {f"{prefix}w.1"}


def test_a_group_that_is_acknowledged_and_not_kept_is_put_again_and_then_refused() -> None:
    class Forgets(FakeMooncake):
        def batch_is_exist(self, keys: list[str]) -> list[int]:
            return [0 for _ in keys]

    fake = Forgets()
    store = opened(fake)
    with pytest.raises(StorageError, match=r"does not keep asyncmoe:run1:.*w\.0 \(its error -1\)"):
        store.put(f"{store.begin(RUN)}w.0", FRAMES)
    assert fake.put_log.count(fake.put_log[-1]) == 2
    assert not fake.objects


def test_a_master_that_is_away_is_asked_again_and_named_in_time() -> None:
    fake = FakeMooncake()
    store = opened(fake)
    name = f"{store.begin(RUN)}w.0"
    fake.ahead = [-900, -901]
    store.put(name, FRAMES)
    fake.ahead = [-900]
    assert not isinstance(store.get([Asked(name, KEYS[0])])[0], DataError)
    for call in (lambda: store.put(f"{name}1", FRAMES), lambda: store.get([Asked(name, KEYS[0])])):
        fake.ahead = [-900] * 1000
        with pytest.raises(StorageError, match=r"payloads: Mooncake at host:1 did not answer for 0\.3 s; bring the master back"):
            call()


def test_a_call_that_never_returns_is_left_alone_in_time() -> None:
    hangs = threading.Event()

    class Hangs(FakeMooncake):
        def get_batch(self, keys: list[str]) -> list[bytes]:
            hangs.wait()
            return []

    store = opened(Hangs())
    with pytest.raises(StorageError, match="did not answer"):
        store.get([Asked("asyncmoe:r:s.w.0", KEYS[0])])
    hangs.set()


def test_memory_of_a_transfer_that_failed_half_way_is_kept_as_it_may_still_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "_KEPT", [])
    monkeypatch.setattr(mooncake_client, "_MOST_KEPT", 2)
    fake = FakeMooncake()
    store = opened(fake)
    store.put(name := f"{store.begin(RUN)}w.0", FRAMES)

    def fails(*_: Any) -> list[list[list[int]]]:
        return [[[-800]]]

    monkeypatch.setattr(fake, "get_into_ranges", fails)
    for count in (1, 2):
        found = store.get([Asked(name, KEYS[0])])[0]
        assert isinstance(found, DataError)
        assert "got Mooncake's error -800, expected what was put there" in str(found)
        assert len(fake.registered) == len(mooncake_client._KEPT) == count
    with pytest.raises(StorageError, match="2 transfers from Mooncake have failed half way"):
        store.get([Asked(name, KEYS[0])])


def test_only_what_is_this_run_s_is_deleted_and_a_lost_process_s_after_a_while() -> None:
    fake = FakeMooncake()
    store = opened(fake)
    others = {"asyncmoe:run10:s.w.0:index": b"x", "kv": b"x", "asyncmoe:run1": b"x"}
    fake.objects |= others | {"asyncmoe:run1:old.w.0:index": b"x"}
    prefix = store.begin(RUN)
    assert fake.objects == others
    for writer in ("a", "b"):
        for number in range(2):
            store.put(f"{prefix}{writer}.{number}", FRAMES)
    live = {f"{prefix}a.0", f"{prefix}b.0"}
    store.sweep(prefix, live)
    store._left_s = 0.0
    store.sweep(prefix, {f"{prefix}b.0"})
    left = {key.rpartition(":")[0] for key in fake.objects if key not in others}
    assert left == {f"{prefix}b.0", f"{prefix}b.1"}, "the controller has no group of a, and has one of b"
    store.clear(prefix)
    assert fake.objects == others
    store.end()
    with pytest.raises(StorageError, match="payloads: the run ends"):
        store.put(f"{prefix}c.0", FRAMES)
    assert fake.objects == others


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("queue.payloads", "mooncake", "queue.mooncake.master: got null, expected host:port because queue.payloads is mooncake"),
        ("queue.mooncake.master", "host:1", "queue.mooncake.master: got host:1, expected null because queue.payloads is workers"),
        ("queue.mooncake.master", "host", "queue.mooncake.master: got host, expected host:port"),
        ("queue.mooncake.master", "http://host:1", "queue.mooncake.master: got http://host:1, expected host:port"),
        ("queue.mooncake.metadata", "host:1", "queue.mooncake.metadata: got host:1, expected P2PHANDSHAKE or http://"),
        ("queue.mooncake.protocol", "udp", "queue.mooncake.protocol: got 'udp', expected 'tcp' or 'rdma'"),
    ],
)
def test_what_cannot_be_is_refused(path: str, value: str, said: str) -> None:
    assert said in refused(with_value(path, value))


def test_a_package_that_is_absent_or_does_not_load_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    section = QueueSection(payloads="mooncake", mooncake={"master": "127.0.0.1:9"})  # type: ignore[arg-type]
    monkeypatch.setattr("asyncmoe.installed.has", lambda module: False)
    with pytest.raises(UserError, match=r"got no module mooncake, expected the extra mooncake; run: .*pip install .*mooncake-transfer"):
        opening.check(section)
    monkeypatch.setattr("asyncmoe.installed.has", lambda module: True)
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"queue\.payloads=mooncake: got .*mooncake.*, expected a package that loads"):
        opening.check(section)
