"""Stores whose process was killed, and disks that forgot: what was durable is there, and nothing torn is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncmoe.errors import DataError
from asyncmoe.journal.segment_format import HEAD_BYTES, file_name
from asyncmoe.journal.segments import Place, Segments
from tests.unit.doc_pages import ROOT
from tests.unit.journal_stores import SIZES, everything, keep, opened, payload, stored


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: what a killed process leaves behind does not depend on the disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as place:
        yield Path(place)


def test_a_store_cut_at_any_byte_has_the_payloads_before_it_and_nothing_else(memory: Path) -> None:
    places = stored(memory / "store")
    (file,) = (memory / "store").glob("*.segment")
    data = file.read_bytes()
    for cut in range(len(data) + 1):
        folder = memory / "cut"
        folder.mkdir(mode=0o700)
        (folder / file.name).write_bytes(data[:cut])
        with closing(opened(folder)) as store:
            for number, place in enumerate(places):
                if place.end <= cut:
                    assert store.read(place) == payload(number, SIZES[number])
                else:
                    with pytest.raises(DataError, match=f"{file.name} offset {place.offset}: got "):
                        store.read(place)
            whole = max((place.end for place in places if place.end <= cut), default=min(cut, 64))
            assert ((folder / file.name).stat().st_size, store.torn) == (whole, cut - whole)
            assert store.append([b""]).segment == 1, "a place never means two payloads"
        shutil.rmtree(folder)


def test_a_process_killed_anywhere_loses_nothing_that_was_durable(memory: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.journal_stores", str(memory), "7"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    calls = at_moments = 0
    for said in sorted(memory.glob("*.said")):
        folder = said.with_suffix("") if said.with_suffix("").exists() else None
        durable = [json.loads(line) for line in said.read_text().splitlines()]
        calls += said.name.startswith("call-")
        at_moments += len(durable) if said.name.startswith("moment-") else 0
        if folder is None:
            assert not durable
            continue
        appended = {payload(number, size) for number, size, *_ in durable}
        with closing(opened(folder)) as store:
            assert not list(folder.glob("*.writing"))
            kept = {int(found[1]) for file in folder.iterdir() if (found := re.fullmatch(r"0000-(\d+)\.segment", file.name))}
            for number, size, segment, offset in durable:
                if segment in kept or len(durable) < 2 * len(SIZES):
                    assert store.read(Place(0, segment, offset, size)) == payload(number, size), (folder, number)
        whole = everything(folder)
        if folder.name.startswith("call-"):
            every = {payload(number, SIZES[number % len(SIZES)]) for number in range(2 * len(SIZES))}
            assert set(whole) <= every
            assert len(set(whole) - appended) <= 1, "one payload was under way"
    assert calls > 80, "changes of the disk were counted"
    assert at_moments >= 8


class ForgetfulDisk:
    """What a disk would have if power failed: of a file what was last synced, of a folder the names that were."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.contents: dict[int, bytes] = {}
        self.names: dict[str, int] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._remembering(getattr(os, name)))

    def _remembering(self, real):  # type: ignore[no-untyped-def]
        def sync(fd: int) -> None:
            found = os.fstat(fd)
            # What is written while the sync is under way may be on disk or not.
            before = b"" if stat.S_ISDIR(found.st_mode) else os.pread(fd, found.st_size, 0)
            real(fd)
            time.sleep(0.002)
            if not stat.S_ISDIR(found.st_mode):
                self.contents[found.st_ino] = before
            elif os.path.samefile(f"/proc/self/fd/{fd}", self.folder):
                self.names = {entry.name: entry.inode() for entry in os.scandir(self.folder)}

        return sync

    def after_power_failed(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        for name, inode in self.names.items():
            (folder / name).write_bytes(self.contents.get(inode, b""))


def test_what_is_durable_is_on_a_disk_that_forgets_what_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ForgetfulDisk(tmp_path / "store", monkeypatch)
    places: list[Place] = []

    async def write() -> None:
        with closing(opened(tmp_path / "store", segment_bytes=300)) as store:
            store.append([payload(99, 50)])
            for number, size in enumerate(SIZES * 2):
                places.append(await keep(store, [payload(number, size)]))
                disk.after_power_failed(tmp_path / f"after {number}")

    asyncio.run(write())
    for number in range(len(places)):
        with closing(opened(tmp_path / f"after {number}")) as store:
            for earlier, place in enumerate(places[: number + 1]):
                assert store.read(place) == payload(earlier, (SIZES * 2)[earlier])
    assert len({place.segment for place in places}) > 3


def test_no_sync_counts_for_what_was_written_during_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ForgetfulDisk(tmp_path / "store", monkeypatch)
    early: list[Place] = []

    async def one(store: Segments, task: int) -> None:
        for number in range(task, 400, 20):
            place = await keep(store, [payload(number, 50)])
            data = disk.contents[disk.names[file_name(0, place.segment)]]
            if data[place.offset + HEAD_BYTES :][:50] != payload(number, 50):
                early.append(place)

    async def write() -> None:
        with closing(opened(tmp_path / "store", segment_bytes=5000)) as store:
            await asyncio.gather(*(one(store, task) for task in range(20)))

    asyncio.run(write())
    assert not early


def test_a_segment_is_on_disk_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ForgetfulDisk(tmp_path / "store", monkeypatch)
    rename = os.rename
    torn: list[str] = []

    def watched(*arguments: str, **more: int) -> None:
        rename(*arguments, **more)
        for file in sorted((tmp_path / "store").glob("*.segment"))[:-1]:
            if disk.contents[file.stat().st_ino] != file.read_bytes():
                torn.append(file.name)

    monkeypatch.setattr(os, "rename", watched)
    with closing(opened(tmp_path / "store", segment_bytes=200)) as store:
        for number in range(50):
            store.append([payload(number, 50)])
    assert len(list((tmp_path / "store").glob("*.segment"))) > 20
    assert not torn
