"""Versions as deltas: bit for bit what whole versions are, for whoever follows, misses versions or comes late; damage is found."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import DataError, InvariantBroken, LayoutError, StorageError
from asyncmoe.reshard import RankLayout
from asyncmoe.reshard.delta_format import FRAME_BYTES
from asyncmoe.version_store import Geometry, HeldVersion, Retention, ShardReader, StoreFiles, VersionId, VersionStore, divide, open_files
from asyncmoe.version_store import manifest as manifests
from asyncmoe.version_store.manifest import StoredDelta, StoredObject, VersionManifest
from tests.unit.doc_pages import ROOT
from tests.unit.example_counts import examples
from tests.unit.reshard_ranks import Arrays, blank, filled
from tests.unit.test_reshard_random import Shapes, cases
from tests.unit.version_stores import WIDE, Writers, opened, readers, stepped

SIZES = st.tuples(st.sampled_from([256, 2048, 1 << 20]), st.sampled_from([4096, 1 << 20]))
CHANGES = st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]), min_size=2, max_size=5)


class Engine:
    """A rank that holds versions: one in use, and memory for the next."""

    def __init__(self, store: VersionStore, geometry: Geometry, layout: RankLayout, **how: int) -> None:
        self.layout, self.store = layout, store
        self.reader = ShardReader(store, geometry, layout, **how)
        self.held: HeldVersion | None = None
        self.spare = blank(layout)

    def take(self, manifest: VersionManifest) -> int:
        """Read a version and use it; return the bytes read."""
        arrays, found = self.spare, self.reader.read(manifest, self.spare, held=self.held)
        self.spare = blank(self.layout) if self.held is None else dict(self.held.arrays)
        self.held = HeldVersion(manifest, arrays)
        return found

    def parts(self, manifest: VersionManifest) -> int:
        """Bytes of the newest deltas of the slabs that it holds."""
        ranges = self.reader.plan.ranges
        newest = [(manifest.ranks[one.rank][one.object].deltas[-1], self.reader._local(one, one.first), one) for one in ranges]
        return sum(sum(delta.parts[first : first + one.last - one.first]) for delta, first, one in newest)

    def check(self, values: Arrays) -> None:
        assert self.held is not None
        for name, expected in filled(self.layout, values).items():
            np.testing.assert_array_equal(self.held.arrays[name], expected)


def manifest_of(store: VersionStore, step: int) -> VersionManifest:
    found = store.manifest(VersionId(0, step))
    assert found is not None
    return found


def objects_of(manifest: VersionManifest) -> list[StoredObject]:
    return [one for rank in manifest.ranks for one in rank]


# ---------------------------------------------------------------- what arrives


@given(cases(24), SIZES, CHANGES, st.sampled_from([2, 3, 100]), st.sampled_from([1, 3000, 1 << 20]), st.randoms(use_true_random=False))
@settings(max_examples=examples(50), deadline=None)
def test_versions_in_a_row_are_what_was_written_whoever_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[Shapes, list[RankLayout], list[RankLayout]],
    sizes: tuple[int, int],
    changes: list[float],
    full_every: int,
    range_bytes: int,
    chance: random.Random,
) -> None:
    """Any layouts, any share of changed elements: who follows, who misses versions, and who starts from nothing."""
    shapes, source, destination = case
    made = divide(shapes, source, destination, slab_bytes=sizes[0], object_bytes=sizes[1])
    store = opened(tmp_path_factory.mktemp("store"))
    writers = Writers(store, full_every, source, made)
    generator = np.random.default_rng(chance.randrange(1 << 30))
    values = {name: generator.integers(-(1 << 31), 1 << 31, shape).astype(np.int32) for name, shape in shapes.items()}
    following = [Engine(store, writers.geometry, layout, range_bytes=range_bytes) for layout in destination]
    missing = [Engine(store, writers.geometry, layout, range_bytes=range_bytes) for layout in destination]
    for step, share in enumerate(changes):
        values = {name: value.copy() for name, value in values.items()}
        for value in values.values():
            value ^= np.where(generator.random(value.shape) < share, 1 << chance.randrange(31), 0).astype(np.int32)
        writers.write(VersionId(0, step), values)
        manifest = manifest_of(store, step)
        late = [Engine(store, writers.geometry, layout, range_bytes=range_bytes) for layout in destination]
        for engine in (*following, *late, *(missing if chance.random() < 0.5 else ())):
            engine.take(manifest)
            engine.check(values)


def test_what_is_written_and_read_is_what_changed(tmp_path: Path) -> None:
    """Of a version of which one element in a hundred changed; an engine rank reads the changes of its own slabs and nothing else."""
    store = opened(tmp_path)
    writers = Writers(store, 4)
    engines = [Engine(store, writers.geometry, layout) for layout in readers(2, WIDE)]
    whole = sum(int(slabs.object_bytes.sum()) for slabs in writers.geometry.ranks)
    elements = sum(int(np.prod(shape)) for shape in WIDE.values())
    for step in range(1, 10):
        before = set(store.files.names("objects"))
        writers.write(VersionId(0, step), stepped(step))
        new = sum((tmp_path / name).stat().st_size for name in set(store.files.names("objects")) - before)
        manifest = manifest_of(store, step)
        found = [engine.take(manifest) for engine in engines]
        for engine in engines:
            engine.check(stepped(step))
        sizes = [writer.size for writer in writers.ranks.values()]
        if step == 1:
            assert sum(found) >= whole * 0.99
            assert [size.changed for size in sizes] == [None, None]
            assert new == sum(size.nbytes for size in sizes) + len(writers.geometry.encode())
            continue
        deltas = sum(one.deltas[-1].nbytes for one in objects_of(manifest))
        # 8 bytes a change and a gap of 1, 72 for the frame of a slab, 8 for its block
        assert deltas <= elements / 97 * 9.5 + sum(len(slabs.dtypes) for slabs in writers.geometry.ranks) * 80
        assert found == [engine.parts(manifest) for engine in engines], "engines read whole objects at the beginning only"
        changed, counted = sum(size.changed or 0 for size in sizes), sum(size.elements for size in sizes)
        assert counted == elements
        expected = sum(int((a != b).sum()) for a, b in zip(stepped(step).values(), stepped(step - 1).values(), strict=True))
        assert changed == expected
        assert new == sum(size.nbytes for size in sizes) == deltas + (whole if step in (5, 9) else 0), "whole every fourth time"
        late = Engine(store, writers.geometry, readers(2, WIDE)[0])
        chain = sum(delta.nbytes for one in objects_of(manifest) for delta in one.chain)
        assert late.take(manifest) <= late.reader.plan.nbytes + chain
        late.check(stepped(step))


def test_what_has_not_changed_is_neither_written_nor_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    writers = Writers(store, 3)
    values = stepped(1)
    engine = Engine(store, writers.geometry, readers(2, WIDE)[0])
    for step in range(1, 6):
        values["up"][3, 5] += 1
        before = set(store.files.names("objects"))
        writers.write(VersionId(0, step), values)
        found = engine.take(manifest_of(store, step))
        engine.check(values)
        if step > 1:
            assert 1 <= len(set(store.files.names("objects")) - before) <= 2
            assert found == FRAME_BYTES + 8 + 5, "one slab of one block, a gap and a value"
    writers.write(VersionId(0, 6), values)
    assert engine.take(manifest_of(store, 6)) == 0
    engine.check(values)


def test_an_object_of_which_much_changed_is_written_whole(tmp_path: Path) -> None:
    store = opened(tmp_path)
    writers = Writers(store, 100)
    engine = Engine(store, writers.geometry, readers(2, WIDE)[0])
    values = stepped(1)
    for step in range(1, 4):
        values["embedding"] += 1
        values["up"].reshape(-1)[step::50] += 1
        writers.write(VersionId(0, step), values)
        found = engine.take(manifest_of(store, step))
        engine.check(values)
    objects = objects_of(manifest_of(store, 3))
    assert {0, 2} <= {len(one.deltas) for one in objects}
    assert found > 96 * 64 * 4 / 2


def test_deltas_together_are_at_most_half_of_their_object(tmp_path: Path) -> None:
    """So an engine that starts from nothing reads at most half as much again."""
    store = opened(tmp_path)
    writers = Writers(store, 1000)
    values, longest = stepped(1), 0
    generator = np.random.default_rng(3)
    for step in range(1, 14):
        for value in values.values():
            value ^= (generator.random(value.shape) < 0.03).astype(np.int32)
        writers.write(VersionId(0, step), values)
        for one in objects_of(manifest_of(store, step)):
            assert 2 * sum(delta.nbytes for delta in one.chain) <= one.nbytes
            longest = max(longest, len(one.chain))
    assert longest >= 4
    late = Engine(store, writers.geometry, readers(2, WIDE)[1])
    assert late.reader.plan.nbytes < late.take(manifest_of(store, 13)) <= 1.5 * late.reader.plan.nbytes
    late.check(values)


def test_a_trainer_that_starts_again_writes_whole_objects_and_engines_go_on(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = Writers(store, 100)
    engine = Engine(store, first.geometry, readers(2, WIDE)[0])
    for step in (1, 2):
        first.write(VersionId(0, step), stepped(step))
        engine.take(manifest_of(store, step))
    Writers(store, 100).write(VersionId(0, 3), stepped(3))
    manifest = manifest_of(store, 3)
    assert not any(one.deltas for one in objects_of(manifest))
    assert engine.take(manifest) == engine.reader.plan.nbytes
    engine.check(stepped(3))


def test_full_every_is_checked(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="full_every: got 0, expected at least 1"):
        Writers(opened(tmp_path), 0)


# ---------------------------------------------------------------- what goes wrong


class Chain:
    """Three versions, the second and third as deltas, and an engine that holds the second."""

    def __init__(self, files: StoreFiles | Path) -> None:
        self.store = opened(files)
        self.writers = Writers(self.store, 100)
        self.engine = Engine(self.store, self.writers.geometry, readers(2, WIDE)[0])
        for step in (1, 2, 3):
            self.writers.write(VersionId(0, step), stepped(step))
            if step < 3:
                self.engine.take(manifest_of(self.store, step))
        self.manifest = manifest_of(self.store, 3)
        one = self.engine.reader.plan.ranges[0]
        self.place = one.rank, one.object

    @property
    def object(self) -> StoredObject:
        return self.manifest.ranks[self.place[0]][self.place[1]]

    def with_deltas(self, *deltas: StoredDelta) -> VersionManifest:
        """The manifest, with other deltas of one object."""
        rank, number = self.place
        changed = list(self.manifest.ranks[rank])
        changed[number] = replace(self.object, deltas=deltas)
        ranks = list(self.manifest.ranks)
        ranks[rank] = tuple(changed)
        return replace(self.manifest, ranks=tuple(ranks))

    def refused(self, manifest: VersionManifest) -> str:
        """Have the engine and one that starts from nothing read a version; return what both say. Nothing is half applied."""
        held = self.engine.held
        assert held is not None
        before = {name: array.copy() for name, array in held.arrays.items()}
        said = []
        for engine in (self.engine, Engine(self.store, self.writers.geometry, readers(2, WIDE)[0])):
            with pytest.raises(DataError) as refused:
                engine.take(manifest)
            said.append(str(refused.value))
        assert self.engine.held is held
        for name, array in held.arrays.items():
            np.testing.assert_array_equal(array, before[name])
        assert said[0] == said[1], "the engine that holds the version before has tried it from the beginning, too"
        assert "\n" not in said[0]
        return said[0]


@pytest.fixture(params=["directory", "memory"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    yield Chain(open_files(str(tmp_path / "store") if request.param == "directory" else "memory://store", "sync.store.url", 10.0))
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("missing", "got no such object, expected"),
        ("truncated", r"got \d+ bytes at \d+, expected \d+ bytes at"),
        ("altered", "got (bytes of another digest than its name|a delta that is cut off or altered)"),
    ],
)
def test_a_delta_that_is_not_as_written_is_named(chain: Chain, harm: str, said: str) -> None:
    delta = chain.object.deltas[-1]
    data = chain.store.files.read(delta.name) or b""
    if harm == "missing":
        chain.store.files.delete(delta.name)
    else:
        chain.store.files.write(delta.name, data[: len(data) // 3] if harm == "truncated" else bytes(byte ^ 1 for byte in data))
    line = chain.refused(chain.manifest)
    assert f"{delta.name} of version 3 of lineage 0" in line
    assert re.search(said, line)


def test_every_altered_byte_of_a_delta_that_a_reader_reads_is_found(tmp_path: Path) -> None:
    """Where only a part of the delta is read, too, so that its name says nothing."""
    chain = Chain(tmp_path)
    reader = ShardReader(chain.store, chain.writers.geometry, chain.engine.layout, range_bytes=1)
    parts, chance = 0, random.Random(5)
    for one in reader.plan.ranges:
        delta = chain.manifest.ranks[one.rank][one.object].deltas[-1]
        local = reader._local(one, one.first)
        begin, nbytes = sum(delta.parts[:local]), delta.parts[local]
        path = tmp_path / delta.name
        whole = path.read_bytes()
        data = bytearray(whole)
        data[begin + chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        with pytest.raises(DataError, match="expected the delta as it was written") as refused:
            reader.read(chain.manifest, blank(chain.engine.layout), held=chain.engine.held)
        assert delta.name in str(refused.value)
        parts += "slab" in str(refused.value)
        path.write_bytes(whole)
    reader.read(chain.manifest, blank(chain.engine.layout), held=chain.engine.held)
    assert parts > 1


def test_a_delta_of_another_base_is_refused(chain: Chain) -> None:
    """A whole one, of the same slabs, but of other weights."""
    first, last = chain.object.deltas
    line = chain.refused(chain.with_deltas(last))
    assert f"{last.name} of version 3" in line
    assert "got a change of digest" in line
    line = chain.refused(chain.with_deltas(first))
    assert f"{chain.object.name} of version 3 of lineage 0: got an altered object" in line


def test_a_repeated_delta_is_refused(chain: Chain) -> None:
    first, last = chain.object.deltas
    for several, wrong in (((first, first, last), first), ((first, last, last), last)):
        line = chain.refused(chain.with_deltas(*several))
        assert f"{wrong.name} of version 3 of lineage 0: slab" in line
        assert "got a change of digest" in line


def test_a_delta_of_another_object_is_refused(chain: Chain) -> None:
    rank, _ = chain.place
    other = next(one for one in chain.manifest.ranks[1 - rank] if len(one.slabs) == len(chain.object.slabs))
    line = chain.refused(chain.with_deltas(chain.object.deltas[0], other.deltas[-1]))
    assert "got a delta of another slab" in line


def test_a_part_of_an_impossible_size_takes_no_memory(chain: Chain) -> None:
    last = chain.object.deltas[-1]
    huge = StoredDelta(last.digest, (1 << 50, *last.parts[1:]))
    line = chain.refused(chain.with_deltas(chain.object.deltas[0], huge))
    assert "slab 0: got 1125899906842624 bytes, expected 72 to 4176, or 0" in line


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["a" * 64, 8, "0" * 16, [], "b" * 64], "a former object without a delta"),
        (["a" * 64, 8, "0" * 16, [["b" * 64, [80, 80]]], ""], "a delta without a part for each of 1 slabs"),
        (["a" * 64, 8, "0" * 16, [["b" * 64, [-80]]], ""], "an object without a size"),
        (["a" * 64, 8, "0" * 16, [["../x", [80]]], ""], "an object without a digest"),
        (["a" * 64, 8, "0" * 16, [["b" * 64, [80]]], "../x"], "an object without a digest"),
        (["a" * 64, 8, "0" * 16, {}, ""], "an object without slabs or deltas"),
        (["a" * 64, 8, "0" * 16], "missing 2 required positional arguments"),
        (["a" * 64, 8, "0" * 15, [], ""], "digests of slabs that are cut off"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(row: list[object], said: str) -> None:
    told = {"format": manifests.FORMAT, "run": "r", "lineage": 0, "step": 1, "geometry": "c" * 64, "ranks": [[row]]}
    with pytest.raises(DataError, match=said):
        manifests.decode(manifests.sealed(json.dumps(told).encode()), "file")


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    store = opened(tmp_path)
    writers = Writers(store, 2)
    for step in (1, 2, 3):
        writers.write(VersionId(0, step), stepped(step))
    manifest = manifest_of(store, 3)
    assert any(one.former and one.deltas and not one.chain for one in objects_of(manifest))
    assert manifests.decode(manifest.encode(), "file") == manifest


def test_memory_that_somebody_wrote_is_not_built_upon(chain: Chain, caplog: pytest.LogCaptureFixture) -> None:
    """The engine reads those objects from the beginning, and says so."""
    held = chain.engine.held
    assert held is not None
    held.arrays["up"][3, 3] += 1
    held.arrays["down"][0, 0] += 1
    with caplog.at_level(logging.WARNING):
        found = chain.engine.take(chain.manifest)
    chain.engine.check(stepped(3))
    assert found > chain.object.nbytes / 2
    assert len(caplog.messages) == 1
    assert "in its memory: got digest" in caplog.messages[0]
    assert "; 1 more; reading them from the beginning" in caplog.messages[0]


def test_a_writer_whose_memory_changed_before_it_compared_is_found_by_readers(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.engine.take(chain.manifest)
    chain.writers.ranks[0]._base[5] ^= 1
    chain.writers.write(VersionId(0, 4), stepped(4))
    assert "slab 0: got a delta that makes digest" in chain.refused(manifest_of(chain.store, 4))
    for writer in chain.writers.ranks.values():
        writer.forget()
    chain.writers.write(VersionId(0, 5), stepped(5))
    manifest = manifest_of(chain.store, 5)
    assert not any(one.deltas for one in objects_of(manifest))
    chain.engine.take(manifest)
    chain.engine.check(stepped(5))


def test_a_writer_whose_memory_changed_after_it_compared_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path)
    writer = chain.writers.ranks[0]
    plain = writer._table.encode

    def spoilt(*how: Any) -> tuple[np.ndarray, int, int]:
        found = plain(*how)
        writer._base[5] = 77
        return found

    values = stepped(3)
    for value in values.values():
        value.reshape(-1)[1::64] += 1  # the second element of every slab, too

    with monkeypatch.context() as patch:
        patch.setattr(writer._table, "encode", spoilt)
        with pytest.raises(InvariantBroken, match="rank 0: slab 0 of the version that was written last changed in memory"):
            chain.writers.write(VersionId(0, 4), values)
    chain.writers.write(VersionId(0, 5), stepped(5))
    manifest = manifest_of(chain.store, 5)
    assert not any(one.deltas for one in manifest.ranks[0])
    chain.engine.take(manifest)
    chain.engine.check(stepped(5))


def test_after_a_version_that_could_not_be_written_the_next_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(tmp_path)
    plain, calls = chain.store.files.write, 0

    def full(name: str, data: bytes | memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StorageError("the version store", name, OSError(28, "No space left on device"))
        plain(name, data)

    with monkeypatch.context() as patch:
        patch.setattr(chain.store.files, "write", full)
        with pytest.raises(StorageError):
            chain.writers.write(VersionId(0, 4), stepped(4))
    assert chain.store.versions()[-1] == VersionId(0, 3)
    chain.engine.take(chain.manifest)
    chain.writers.write(VersionId(0, 5), stepped(5))
    manifest = manifest_of(chain.store, 5)
    assert not any(one.deltas for one in manifest.ranks[0])
    chain.engine.take(manifest)
    chain.engine.check(stepped(5))


def test_a_writer_killed_in_a_delta_version_leaves_whole_versions(tmp_path: Path) -> None:
    """kill -9 with half a file of it written, the first, one in between, the manifest: the version before is the newest, and whole, for
    who starts from nothing and for who follows; the next writer goes on."""
    store = opened(tmp_path)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "unit")))
    engines: list[Engine] = []
    for last, when in ((0, "1"), (2, "4"), (4, "manifest")):
        command = [sys.executable, "-m", "tests.unit.version_stores", str(tmp_path), str(last + 1), "100", when]
        process = subprocess.run(command, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, timeout=60)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert [version.step for version in store.versions()] == list(range(1, last + 3))
        newest = store.newest()
        assert newest is not None
        assert newest.version.step == last + 2
        assert all(len(one.deltas) == 1 for one in objects_of(newest))
        fresh = [Engine(store, store.geometry(newest.geometry), layout) for layout in readers(2, WIDE)]
        for engine in (*engines, *fresh):
            engine.take(newest)
            engine.check(stepped(last + 2))
        engines = fresh
        names = store.files.names("objects") + store.files.names("versions")
        left = set(names) - set[str]().union(*(manifest_of(store, version.step).objects for version in store.versions()))
        assert any(".writing-" in name for name in left)
    orphans = [name for name in left if name.startswith("objects/") and ".writing-" not in name]
    assert len(orphans) >= len(objects_of(newest)), "all deltas of the last, and no manifest"


# ---------------------------------------------------------------- retention


def test_what_a_kept_version_is_made_of_stays(tmp_path: Path) -> None:
    """An engine that starts from nothing reads the newest version, whatever was deleted of those before it."""
    store, now = opened(tmp_path), [0.0]
    writers = Writers(store, 4)
    retention = Retention(store, 1, 5.0, lambda: now[0])
    for step in range(1, 12):
        writers.write(VersionId(0, step), stepped(step))
        now[0] += 10.0
        retention.prune()
        for layout in readers(2, WIDE):
            late = Engine(store, writers.geometry, layout)
            late.take(manifest_of(store, step))
            late.check(stepped(step))
    now[0] += 10.0
    retention.prune()
    newest = manifest_of(store, 11)
    assert any(len(one.chain) == 2 for one in objects_of(newest))
    assert store.versions() == [VersionId(0, 11)]
    assert set(store.files.names("objects")) == newest.objects, "and nothing else"
