"""Versions as files: whole or absent, verified, kept as long as they are needed; in a directory and in memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from asyncmoe import storage
from asyncmoe.errors import AsyncmoeError, DataError, StorageError, UserError, WaitTimeout
from asyncmoe.reshard import RankLayout
from asyncmoe.storage import within
from asyncmoe.version_store import Folder, Retention, ShardReader, ShareWriter, StoreFiles, VersionId, VersionStore, open_files
from asyncmoe.version_store import writer as writers_module
from asyncmoe.version_store.files import TEMPORARY
from asyncmoe.version_store.manifest import VersionManifest, digest_of, object_name
from asyncmoe.version_store.retention import due, unneeded
from tests.disks import mounted
from tests.unit.doc_pages import ROOT
from tests.unit.reshard_ranks import Arrays, blank, filled
from tests.unit.version_stores import WIDE, Writers, opened, readers, sharing, stepped, trainers, values_of, write

T = TypeVar("T")


@pytest.fixture(params=["directory", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreFiles]:
    yield open_files(str(tmp_path / "store") if request.param == "directory" else "memory://store", "sync.store.url", 10.0)
    MemoryFileSystem.store.clear()


def manifest_of(store: VersionStore, step: int) -> VersionManifest:
    found = store.manifest(VersionId(0, step))
    assert found is not None
    return found


def shard(store: VersionStore, manifest: VersionManifest, layout: RankLayout) -> Arrays:
    got = blank(layout)
    ShardReader(store, store.geometry(manifest.geometry), layout).read(manifest, got)
    return got


def check(store: VersionStore, step: int) -> None:
    for layout in readers():
        got = shard(store, manifest_of(store, step), layout)
        for name, expected in filled(layout, values_of(step)).items():
            np.testing.assert_array_equal(got[name], expected)


def test_versions_are_written_and_read(files: StoreFiles) -> None:
    store = opened(files)
    store.claim()
    store.claim()
    assert store.newest() is None
    for step in (1, 2, 10):
        write(store, VersionId(0, step))
        check(store, step)
    assert store.versions() == [VersionId(0, 1), VersionId(0, 2), VersionId(0, 10)]
    write(store, VersionId(1, 3))
    newest = store.newest()
    assert newest is not None
    assert newest.version == VersionId(1, 3), "a later lineage is newer"
    check(store, 2)


def test_what_is_there_already_is_not_written_again(files: StoreFiles) -> None:
    store = opened(files)
    write(store, VersionId(0, 1))
    before = set(files.names("objects"))
    written: list[str] = []
    plain = files.write

    def noted(name: str, data: bytes | memoryview) -> None:
        written.append(name)
        plain(name, data)

    files.write = noted  # type: ignore[method-assign]
    write(store, VersionId(0, 2), values_of(1))
    assert written == [VersionId(0, 2).name]
    assert set(files.names("objects")) == before


@pytest.mark.parametrize("full_every", [1, 4])
@pytest.mark.parametrize("again", ["started", "forgotten"])
def test_what_is_damaged_is_written_again(files: StoreFiles, full_every: int, again: str) -> None:
    """Weights and geometry, by a writer that starts again or was told that nobody could read the version."""
    store = opened(files)
    writers = Writers(store, full_every)
    writers.write(VersionId(0, 1), stepped(1))
    manifest = manifest_of(store, 1)
    for name in manifest.objects:
        data = files.read(name) or b""
        files.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    if again == "started":
        writers = Writers(store, full_every)
    else:
        for writer in writers.ranks.values():
            writer.forget()
    writers.write(VersionId(0, 1), stepped(1))
    assert manifest_of(store, 1) == manifest
    for layout in readers(2, WIDE):
        got = shard(store, manifest, layout)
        for name, expected in filled(layout, stepped(1)).items():
            np.testing.assert_array_equal(got[name], expected)


def test_a_writer_reads_what_is_there_once(files: StoreFiles) -> None:
    """After a start, and when it was told to forget; what it wrote itself it does not read."""
    store, read = opened(files), list[str]()
    plain = files.read

    def noted(name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
        read.append(name)
        return plain(name, begin, nbytes)

    Writers(store, 1).write(VersionId(0, 1), stepped(1))
    manifest = manifest_of(store, 1)
    weights = sorted(one.name for rank in manifest.ranks for one in rank)
    files.read = noted  # type: ignore[method-assign]
    writers = Writers(store, 1)
    for step in (2, 3, 4):
        read.clear()
        if step == 4:
            for writer in writers.ranks.values():
                writer.forget()
        writers.write(VersionId(0, step), stepped(1))
        assert sorted(set(read) - {object_name(manifest.geometry)}) == ([] if step == 3 else weights)
        assert len(read) == len(set(read))


def test_a_buffer_of_a_write_that_did_not_end_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory hangs before it writes an object, the next one is packed, the first goes on: no file has another digest than its name."""
    made, _ = sharing()
    files = Folder(tmp_path, 0.5)
    writer = ShareWriter(made.tensors, made.shares[0], VersionStore(files, ""), lanes=1)
    plain, hung, go_on = storage.make_private, list[Path](), threading.Event()

    def first_hangs(path: Path) -> None:
        plain(path)
        if hung:
            go_on.set()
            eventually(lambda: objects(hung[0]))
        else:
            hung.append(path)
            assert go_on.wait(30.0)

    def all_begin(act: Callable[[int], Any], count: int, lanes: int, name: str) -> list[Any]:
        """`each`, of which the caller wakes so late that all have begun when it hears of the first error."""
        found = list[WaitTimeout]()
        for number in range(count):
            try:
                act(number)
            except WaitTimeout as error:
                found.append(error)
        raise found[0]

    monkeypatch.setattr(storage, "make_private", first_hangs)
    monkeypatch.setattr(writers_module, "each", all_begin)
    with pytest.raises(WaitTimeout, match="to be written"):
        writer.write(filled(trainers()[0], values_of(1)))
    written = eventually(lambda: objects(tmp_path / "objects"))
    assert len(written) > 1
    assert [path.name for path in written] == [digest_of(path.read_bytes()) for path in written]


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(TEMPORARY)]


def eventually(look: Callable[[], T]) -> T:
    until = time.monotonic() + 30
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.01)
    assert found
    return found


def test_another_run_is_refused(files: StoreFiles) -> None:
    opened(files).claim()
    with pytest.raises(DataError, match="got versions of run run-a, expected of run run-b; give every run a store of its own"):
        opened(files, "run-b").claim()
    write(opened(files), VersionId(0, 1))
    with pytest.raises(DataError, match="got version 1 of lineage 0 of run run-a, expected version 1 of lineage 0 of run run-b"):
        opened(files, "run-b").manifest(VersionId(0, 1))


def largest(files: StoreFiles, manifest: VersionManifest) -> str:
    return max((one for rank in manifest.ranks for one in rank), key=lambda one: one.nbytes).name


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("missing", "got no such object, expected 512 bytes at 0 of 512"),
        ("truncated", "got 500 bytes at 0, expected 512 bytes at 0 of 512"),
        ("altered", "got bytes of another digest than its name, expected the object as it was written"),
    ],
)
def test_an_object_that_is_not_as_written_is_named(files: StoreFiles, harm: str, said: str) -> None:
    store = opened(files)
    write(store, VersionId(0, 1))
    manifest = manifest_of(store, 1)
    name = next(one.name for rank in manifest.ranks for one in rank if one.nbytes == 512)
    data = files.read(name) or b""
    if harm == "missing":
        files.delete(name)
    else:
        files.write(name, data[:500] if harm == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    found = []
    for layout in readers():
        try:
            shard(store, manifest, layout)
        except DataError as error:
            found.append(str(error))
    assert found
    assert all(name in one and "version 1 of lineage 0" in one for one in found)
    assert any(said in one for one in found) or all("slab" in one or "bytes at" in one or "no such object" in one for one in found)


def test_every_altered_byte_that_a_reader_reads_is_found(tmp_path: Path) -> None:
    """By the digests of slabs, too, where only a part of an object is read."""
    store = opened(tmp_path)
    write(store, VersionId(0, 1))
    manifest, layout = manifest_of(store, 1), readers()[0]
    reader = ShardReader(store, store.geometry(manifest.geometry), layout, range_bytes=1)
    slabs = 0
    for one in reader.plan.ranges:
        path = tmp_path / manifest.ranks[one.rank][one.object].name
        data = bytearray(path.read_bytes())
        at = one.begin + random.Random(one.first).randrange(one.nbytes)
        data[at] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(DataError, match="expected the object as it was written") as refused:
            reader.read(manifest, blank(layout))
        slabs += "slab" in str(refused.value)
        data[at] ^= 0x10
        path.write_bytes(data)
    assert slabs > 1
    reader.read(manifest, blank(layout))


def test_a_shard_that_differs_in_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    write(store, VersionId(0, 1))
    manifest, layout = manifest_of(store, 1), readers()[0]
    reader = ShardReader(store, store.geometry(manifest.geometry), layout)
    got = blank(layout)
    plain = reader._verify

    def spoilt(manifest: VersionManifest, arrays: Any) -> None:
        got["up"][3, 3] += 1
        plain(manifest, arrays)

    monkeypatch.setattr(reader, "_verify", spoilt)
    with pytest.raises(DataError, match=r"rank 0: its shard of version 1 of lineage 0: got digest [0-9a-f]{16}, expected"):
        reader.read(manifest, got)


def test_half_a_manifest_is_no_version(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, VersionId(0, 1))
    write(store, VersionId(0, 2))
    path = tmp_path / VersionId(0, 2).name
    path.write_bytes(path.read_bytes()[:-9])
    newest = store.newest()
    assert newest is not None
    assert newest.version == VersionId(0, 1)
    with pytest.raises(DataError, match=r"0000-00000002\.json: got \d+ bytes without the digest of their content"):
        store.manifest(VersionId(0, 2))


def test_a_version_that_was_written_again_is_not_taken_for_the_first(files: StoreFiles) -> None:
    store = opened(files)
    first = write(store, VersionId(0, 1))
    second = write(store, VersionId(0, 1), values_of(5))
    assert store.manifest(VersionId(0, 1), second) is not None
    with pytest.raises(DataError, match=f"expected {first[:16]}, as the trainer announced it"):
        store.manifest(VersionId(0, 1), first)


def test_a_writer_killed_anywhere_leaves_whole_versions(tmp_path: Path) -> None:
    """kill -9 at random moments: a reader sees the version before or the new one, and the next writer goes on."""
    store, seen = opened(tmp_path), 0
    chance = random.Random(7)
    for _ in range(4):
        command = [sys.executable, "-m", "tests.unit.version_stores", str(tmp_path), str(seen + 1)]
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "unit")))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until = time.monotonic() + 60
        while len(store.versions()) < seen + 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.2))
        process.kill()
        process.wait(10)
        process.stdout.close()
        newest = store.newest()
        assert (newest is None) == (seen == 0 and not store.versions())
        for version in store.versions()[-3:]:
            check(store, version.step)
        last = store.versions()[-1].step if store.versions() else 0
        assert last >= seen
        seen = last
    assert seen > 4


# ---------------------------------------------------------------- retention


def test_the_newest_versions_and_what_they_need_stay() -> None:
    needs = {VersionId(0, step): {f"objects/{step}", "objects/all"} for step in (1, 2, 3)}
    files = {name for several in needs.values() for name in several} | {v.name for v in needs} | {"objects/half", VersionId(0, 9).name}
    assert unneeded(files, needs, 2) == {"objects/1", VersionId(0, 1).name, "objects/half", VersionId(0, 9).name}
    since = {"objects/1": 0.0, VersionId(0, 1).name: 0.0, "objects/half": 5.0}
    assert due(since, since, 10.0, 10.0) == [VersionId(0, 1).name, "objects/1"], "the manifest first"
    assert due(["objects/new"], since, 10.0, 10.0) == []


def test_an_engine_that_is_reading_is_not_cut_off(files: StoreFiles) -> None:
    store, now = opened(files), [0.0]
    store.claim()
    retention = Retention(store, 2, 30.0, lambda: now[0])
    for step in (1, 2, 3):
        write(store, VersionId(0, step))
    assert retention.prune() == []
    reading = manifest_of(store, 1)
    now[0] = 29.0
    write(store, VersionId(0, 4))
    assert retention.prune() == []
    for layout in readers():
        shard(store, reading, layout)
    now[0] = 31.0
    gone = retention.prune()
    assert gone[0] == VersionId(0, 1).name
    assert store.versions() == [VersionId(0, 2), VersionId(0, 3), VersionId(0, 4)]
    now[0] = 100.0
    retention.prune()
    assert store.versions() == [VersionId(0, 3), VersionId(0, 4)]
    check(store, 3)
    check(store, 4)
    needed = manifest_of(store, 3).objects | manifest_of(store, 4).objects
    assert set(files.names("objects")) == needed, "nothing of a version that is gone is left"
    opened(files).claim()


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    store, now = opened(tmp_path), [0.0]
    write(store, VersionId(0, 1))
    for name in ("objects/ab/.writing-1", "objects/ab/orphan"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    retention = Retention(store, 1, 5.0, lambda: now[0])
    assert retention.prune() == []
    now[0] = 6.0
    assert retention.prune() == ["objects/ab/.writing-1", "objects/ab/orphan"]
    check(store, 1)


# ---------------------------------------------------------------- places that fail


def test_a_full_store_is_said_and_the_version_before_stays(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "64k") as place:
        store = opened(place)
        write(store, VersionId(0, 1))
        (place / "filler").write_bytes(bytes((os.statvfs(place).f_bavail - 1) * os.statvfs(place).f_frsize))
        with pytest.raises(StorageError, match=r"the version store: cannot write .*: No space left on device \(ENOSPC\)"):
            write(store, VersionId(0, 2))
        assert store.versions() == [VersionId(0, 1)]
        check(store, 1)


class Broken(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Refuses, or does not answer."""

    protocol = "broken"
    cachable = False
    wait_s = 0.0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        time.sleep(Broken.wait_s)
        raise PermissionError(f"403 for https://user:secret@store/{path}")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        raise ConnectionError("the network\nis down")


def test_a_place_that_refuses_or_hangs_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    files = open_files("broken://place", "sync.store.url", 0.3)
    with pytest.raises(StorageError, match=r"^version store broken://place: cannot write a/b: PermissionError: 403 for https://store/"):
        files.write("a/b", b"x")
    with pytest.raises(AsyncmoeError, match=r"^version store broken://place: a/b: ConnectionError: the network is down$"):
        files.read("a/b")
    monkeypatch.setattr(Broken, "wait_s", 2.0)
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for broken://place: a/b"):
        files.write("a/b", b"x")


def test_a_read_that_takes_too_long_ends(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, VersionId(0, 1))
    manifest, layout = manifest_of(store, 1), readers()[0]
    with pytest.raises(WaitTimeout, match="version 1 of lineage 0 to be read"):
        ShardReader(store, store.geometry(manifest.geometry), layout).read(manifest, blank(layout), timeout_s=-1.0)


def test_an_error_passes_through_the_time_limit() -> None:
    def late() -> None:
        raise TimeoutError("of the place itself")

    with pytest.raises(TimeoutError, match="of the place itself"):
        within(5.0, "it", "an answer", late)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/x", "got s3://bucket/x with a user or password, expected a URL without them; give credentials in the"),
        ("nosuch://place", "got nosuch://place: .*, expected a URL that fsspec can open"),
        ("relative/path", "got relative/path, expected an absolute path, or a URL"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(url: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^sync\.store\.url: {said}"):
        open_files(url, "sync.store.url")


def test_a_directory_needs_no_fsspec(tmp_path: Path) -> None:
    assert isinstance(open_files(f"file://{tmp_path}", "sync.store.url"), Folder)
    code = "import sys; sys.modules['fsspec'] = None; from asyncmoe.version_store import open_files; open_files('/tmp/x', 'k')"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
