"""The log with both backends: durable records are recovered, whatever happens to the process, the disk or the server."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import DataError, InvariantBroken, StorageError, UserError
from asyncmoe.log.files import HEADER_BYTES, FileLog
from asyncmoe.log.log import HEAD_BYTES, Log
from tests.disks import mounted
from tests.redis_server import LocalRedis, LossyLink, needed
from tests.unit.asynchronous import asynchronous
from tests.unit.log_lives import Home, home  # noqa: F401

SIZES = (0, 1, 7, 8, 9, 100, 33)


def payload(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


async def keep(log: Log, data: bytes) -> int:
    """Append in parts, and wait until it is durable."""
    position = log.append([data[:3], memoryview(data)[3:]])
    await log.durable(position)
    return position


def filled(log: Log, sizes: Sequence[int] = SIZES) -> list[int]:
    """Close a log with payloads 0, 1, ... of these sizes; return their positions."""

    async def write() -> list[int]:
        with closing(log):
            return [await keep(log, payload(number, size)) for number, size in enumerate(sizes)]

    return asyncio.run(write())


# ---------------------------------------------------------------- both


def test_what_is_appended_is_found_again_in_order(home: Home, tmp_path: Path) -> None:  # noqa: F811
    places = filled(home.log(tmp_path, "1"), SIZES * 2)
    assert places == sorted(set(places))
    with closing(home.log(tmp_path, "1")) as log, closing(home.log(tmp_path, "0")) as other:
        assert [(at, bytes(data)) for at, data in log.read()] == [(at, payload(n, (SIZES * 2)[n])) for n, at in enumerate(places)]
        assert bytes(log.read_at(places[5])) == bytes(other.read_at(places[5], "1")) == payload(5, 100)
        assert log.end > places[-1]
        for wrong in (places[5] + 1, log.end + 100):
            with pytest.raises(DataError, match=rf"position {wrong}: got .*, expected a record; "):
                log.read_at(wrong)


@asynchronous
async def test_what_is_below_a_position_is_let_go_of(home: Home, tmp_path: Path) -> None:  # noqa: F811
    with closing(home.log(tmp_path, "1")) as log:
        places = [await keep(log, payload(n, 1000)) for n in range(40)]
        full = log.size
        assert log.forget(places[30]).result() > 15_000
        assert log.size < full - 15_000
        assert bytes(log.read_at(places[30])) == payload(30, 1000)
        with pytest.raises(DataError):
            log.read_at(places[5])
    with closing(home.log(tmp_path, "1")) as log:
        found = [at for at, _ in log.read()]
        assert found == places[-len(found) :]
        assert set(places[30:]) <= set(found)
        log.forget(log.end).result()
    with closing(home.log(tmp_path, "1")) as log:
        assert list(log.read()) == []
        assert await keep(log, b"more") > places[-1]


@asynchronous
async def test_the_bound_holds_and_a_closed_log_takes_nothing(home: Home, tmp_path: Path) -> None:  # noqa: F811
    with closing(home.log(tmp_path, "1", 20_000)) as log:
        with pytest.raises(StorageError, match=r"^log\.max_bytes: got .* and 0\.00 MiB more, expected at most 0\.02 MiB; raise it"):
            await asyncio.gather(*(keep(log, payload(number, 1000)) for number in range(100)))
        assert 10_000 < log.size <= 20_000
        assert log.is_full(1000)
        log.forget(log.end).result()
        await keep(log, b"room again")
    log.close()
    with pytest.raises(InvariantBroken, match="was used after it was closed"):
        log.append([b"x"])


def test_one_writer_at_a_time(home: Home, tmp_path: Path) -> None:  # noqa: F811
    with closing(home.log(tmp_path, "0")), pytest.raises(UserError, match=rf"in use by another process \(process {os.getpid()} on "):
        home.log(tmp_path, "0")
    home.log(tmp_path, "0").close()


# ---------------------------------------------------------------- files: damage anywhere


DAMAGE = st.tuples(st.sampled_from(["cut", "flip", "copy", "insert"]), st.integers(0, 1 << 30), st.integers(1, 300))


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 120), min_size=1, max_size=20), what=DAMAGE, newest=st.booleans())
def test_damage_anywhere_loses_the_records_it_covers(sizes: list[int], what: tuple[str, int, int], newest: bool) -> None:
    """Bytes cut off, changed, overwritten by others of the file, or moved: every record that is still intact in its place is found."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        places = filled(Home().log(folder, "1", segment_bytes=400), sizes)
        path = (max if newest else min)((folder / "log" / "1").glob("*.segment"))
        before = path.read_bytes()
        path.write_bytes(after := spoiled(before, *what))
        first, whole = int(path.stem), dict(zip(places, enumerate(sizes), strict=True))
        for at, (_, size) in list(whole.items()):
            begin, end = HEADER_BYTES + at - first, HEADER_BYTES + at - first + HEAD_BYTES + size
            if begin >= HEADER_BYTES and begin < len(before) and after[begin:end] != before[begin:end]:
                del whole[at]
        with closing(Home().log(folder, "1", segment_bytes=400)) as log:
            assert [(at, bytes(data)) for at, data in log.read()] == [(at, payload(*one)) for at, one in whole.items()]
            for at, one in whole.items():
                assert bytes(log.read_at(at)) == payload(*one)
            assert asyncio.run(keep(log, b"more")) >= max(whole, default=0)
        with closing(Home().log(folder, "1", segment_bytes=400)) as log:
            assert [bytes(data) for _, data in log.read()][-1] == b"more"


def spoiled(data: bytes, what: str, at: int, length: int) -> bytes:
    at %= len(data) + 1
    end = min(at + length, len(data))
    match what:
        case "cut":
            return data[:at]
        case "flip":
            return data[:at] + bytes(255 - one for one in data[at:end]) + data[end:]
        case "copy":
            other = data[: end - at] if at > len(data) // 2 else data[len(data) - (end - at) :]
            return data[:at] + other + data[end:]
    return data[:at] + data[at:end] + data[at:]


def test_damage_in_the_middle_is_one_line_and_a_torn_end_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = filled(Home().log(tmp_path, "1"))
    path = next((tmp_path / "log" / "1").glob("*.segment"))
    whole = path.read_bytes()
    for data, told in ((whole[:-3], 0), (whole[: HEADER_BYTES + places[3] + 4] + b"?" + whole[HEADER_BYTES + places[3] + 5 :], 1)):
        path.write_bytes(data)
        caplog.clear()
        with closing(Home().log(tmp_path, "1")) as log:
            assert len(list(log.read())) == len(SIZES) - 1
            assert log.damaged == bool(told)
        lines = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
        assert lines == [f"log {tmp_path}/log/1 is damaged: no record from position {places[3]} to {places[4]} can be read"] * told
        shutil.rmtree(tmp_path / "log")
        filled(Home().log(tmp_path, "1"))


# ---------------------------------------------------------------- files: power cuts


class ForgetfulDisk:
    """What a disk would have if power failed: of a file what was last synced, of a folder the names that were."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.contents, self.names = folder, dict[int, bytes](), dict[str, int]()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._remembering(getattr(os, name)))

    def _remembering(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            found = os.fstat(fd)
            # What is written while the sync is under way may be on disk or not.
            before = b"" if stat.S_ISDIR(found.st_mode) else os.pread(fd, found.st_size, 0)
            real(fd)
            time.sleep(0.002)
            if not stat.S_ISDIR(found.st_mode):
                self.contents[found.st_ino] = before
            elif os.path.samefile(f"/proc/self/fd/{fd}", self.folder / "1"):
                self.names = {entry.name: entry.inode() for entry in os.scandir(self.folder / "1") if entry.name != "lock"}

        return sync

    def after_power_failed(self, folder: Path) -> None:
        (folder / "1").mkdir(parents=True, mode=0o700)
        for name, inode in self.names.items():
            (folder / "1" / name).write_bytes(self.contents.get(inode, b""))


@asynchronous
async def test_what_is_durable_is_on_a_disk_that_forgets_what_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, places = ForgetfulDisk(tmp_path / "log", monkeypatch), list[int]()

    async def one(log: Log, numbers: Iterator[int]) -> None:
        for number in numbers:
            position = await keep(log, payload(number, 60))
            places.append(position)
            disk.after_power_failed(after := tmp_path / f"after {number}")
            with closing(FileLog(after, "run", "1")) as left:
                assert bytes(left.read_at(position)) == payload(number, 60)
                for before in places if number % 10 == 0 else ():
                    left.read_at(before)

    with closing(FileLog(tmp_path / "log", "run", "1", segment_bytes=400)) as log:
        numbers = iter(range(60))
        await asyncio.gather(*(one(log, numbers) for _ in range(4)))
    assert len(disk.names) > 8


# ---------------------------------------------------------------- files: bad input


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        filled(Home().log(tmp_path, "1"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*(tmp_path / "log").rglob("*"), tmp_path / "log")} == {0o700, 0o600}


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(StorageError, match="the log: cannot write"):
        Home().log(tmp_path, "1")


@asynchronous
async def test_a_disk_that_fails_is_told_to_all_that_wait_and_come_later(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "2m") as disk:
        (disk / "ballast").write_bytes(bytes(1 << 20))
        log = FileLog(disk / "log", "run", "1")
        await keep(log, b"first")
        failed = await asyncio.gather(*(keep(log, bytes(300_000)) for _ in range(8)), return_exceptions=True)
        assert {type(one) for one in failed} <= {int, StorageError}
        for _ in range(2):
            with pytest.raises(StorageError, match=r"^the log: cannot write .*No space left on device.*make room there[^\n]*$"):
                await keep(log, b"later")
        log.close()
        (disk / "ballast").unlink()
        with closing(FileLog(disk / "log", "run", "1")) as log:
            assert bytes(next(log.read())[1]) == b"first"


@asynchronous
async def test_a_segment_that_is_deleted_while_it_is_written_fails_the_log(tmp_path: Path) -> None:
    with closing(Home().log(tmp_path, "1")) as log:
        await keep(log, b"first")
        next((tmp_path / "log" / "1").glob("*.segment")).unlink()
        with pytest.raises(StorageError, match="was deleted while it was written"):
            await keep(log, b"second")


# ---------------------------------------------------------------- Redis


@contextmanager
def serving(folder: Path) -> Iterator[LocalRedis]:
    with closing(LocalRedis(folder / "redis")) as server:
        yield server


def redis_log(url: str, **options: Any) -> Log:
    from asyncmoe.log import redis

    return redis.RedisLog(redis.RedisServer(url, **options), "run", "0")


@needed()
@pytest.mark.parametrize(
    ("setting", "value"),
    [("appendonly", "no"), ("appendfsync", "everysec"), ("no-appendfsync-on-rewrite", "yes"), ("maxmemory-policy", "allkeys-lru")],
)
def test_a_server_that_may_lose_or_evict_is_refused_and_ends_a_run_that_it_serves(tmp_path: Path, setting: str, value: str) -> None:
    with serving(tmp_path) as server, closing(redis_log(server.url)) as log:
        server.configure(**{setting: value})
        with pytest.raises(UserError, match=rf"^log\.redis: got unix://.* with {setting} {value}, expected {setting} \w+; .*redis\.conf"):
            redis_log(server.url)
        until = time.monotonic() + 10
        while log._failure is None and time.monotonic() < until:
            time.sleep(0.1)
        with pytest.raises(UserError, match=setting):
            log.append([b"x"])


@needed()
@asynchronous
async def test_the_room_of_a_server_is_its_memory(tmp_path: Path) -> None:
    from asyncmoe.log import redis

    with serving(tmp_path) as server, closing(redis_log(server.url)) as log:
        for number in range(50):
            await keep(log, payload(number, 2000))
        for memory, lacks in (("0", False), ("100mb", False), ("1mb", True)):
            server.configure(maxmemory=memory)
            room = redis.RedisServer(server.url).room("run", ["0", "1"])
            assert 50 * 2000 < room.largest < 2 * 50 * 2000
            assert bool(room.lacking(1 << 20, 0)) == lacks


@needed()
def test_a_server_that_is_not_there_or_refuses_the_user_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^log\.redis: unix:///absent \(.*\) does not answer: bring it back, or name another one; "):
        redis_log("unix:///absent", patience_s=0.0)
    with serving(tmp_path) as server:
        server.configure(requirepass="secret")
        with pytest.raises(UserError, match=r"^log\.redis: got .*, expected a user with permission; set ASYNCMOE_LOG_PASSWORD, "):
            redis_log(server.url)
        monkeypatch.setenv("ASYNCMOE_LOG_PASSWORD", "secret")
        redis_log(server.url).close()


@needed()
@asynchronous
async def test_a_request_that_is_sent_again_because_its_answer_was_lost_counts_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        link = LossyLink(server, tmp_path, 0.05, 3)
        with closing(redis_log(f"unix://{link.socket}")) as log:
            places = [await keep(log, payload(number, 200)) for number in range(80)]
            assert link.lost > 3
            link.close()
        with closing(redis_log(server.url)) as log:
            found = dict(log.read())
            assert sorted(found) == sorted(places)
            assert sorted(map(bytes, found.values())) == sorted(payload(number, 200) for number in range(80))


@needed()
@asynchronous
async def test_a_controller_that_wakes_up_after_it_was_replaced_writes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        old = redis_log(server.url)
        await keep(old, b"one")
        old._beat = lambda: None  # type: ignore[method-assign]  # as if suspended: its lock expires
        with closing(redis_log(server.url)) as new:
            await keep(new, b"two")
            with pytest.raises(UserError, match=r"in use by another process \(process \d+ on .*\), expected one controller per run, "):
                await keep(old, bytes(100))
            old.close()
            await keep(new, b"three")
        with closing(redis_log(server.url)) as last:
            assert [bytes(data) for _, data in last.read()] == [b"one", b"two", b"three"]


@needed()
@pytest.mark.parametrize("how", ["full", "lost"])
@asynchronous
async def test_what_a_server_has_lost_or_has_no_room_for_ends_the_log(tmp_path: Path, how: str) -> None:
    with serving(tmp_path) as server:
        log = redis_log(server.url)
        places = [await keep(log, payload(number, 1000)) for number in range(4)]
        with server.client() as client:
            copy = client.dump("asyncmoe:run:0")
            places.append(await keep(log, payload(4, 1000)))
            if how == "full":
                server.configure(maxmemory="2mb")
                with pytest.raises(StorageError, match=r"^log\.redis: unix://.* \(.*\) is full"):
                    await asyncio.gather(*(keep(log, bytes(100_000)) for _ in range(40)))
                server.configure(maxmemory="0")
            else:
                client.restore("asyncmoe:run:0", 0, copy, replace=True)
                with pytest.raises(StorageError, match=r"got records up to \d+, expected \d+; the server lost acknowledged records"):
                    await keep(log, b"more")
            log.close()
        with closing(redis_log(server.url)) as again:
            assert {*places[: 5 if how == "full" else 4]} <= {at for at, _ in again.read()}


@needed()
def test_an_entry_that_is_damaged_or_at_another_place_is_none() -> None:
    from asyncmoe.log import redis

    whole = redis.sealed("key", 7, [b"da", b"ta"])
    assert bytes(redis.opened("key", 7, whole) or b"") == b"data"
    for key, position, data in (("key", 8, whole), ("other", 7, whole), ("key", 7, whole[:-1] + b"?"), ("key", 7, None)):
        assert redis.opened(key, position, data) is None
