"""Who writes which element of a version, and what a rank reads of it: properties over random layouts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import DataError, LayoutError
from asyncmoe.reshard import Box, LayoutBuilder, RankLayout
from asyncmoe.reshard.layout import MAX_DIMS
from asyncmoe.version_store import Geometry, ShardReader, ShareWriter, VersionId, divide, publish
from asyncmoe.version_store import manifest as manifests
from asyncmoe.version_store.geometry import decode
from asyncmoe.version_store.manifest import VersionManifest
from asyncmoe.version_store.read_plan import plan_read
from asyncmoe.version_store.share import Sharing
from tests.unit.example_counts import examples
from tests.unit.reshard_ranks import blank, filled, inside, numbered
from tests.unit.test_reshard_random import Shapes, cases
from tests.unit.version_stores import SHAPES, opened, readers, sharing, trainers

Case = tuple[Shapes, list[RankLayout], list[RankLayout]]
SIZES = st.tuples(st.sampled_from([1, 8, 40, 4096]), st.sampled_from([1, 64, 4096]))


def geometry_of(made: Sharing) -> Geometry:
    return Geometry(made.tensors, tuple(share.slabs for share in made.shares.values()))


def counted(shapes: Shapes, geometry: Geometry) -> dict[str, np.ndarray]:
    """How often each element is written."""
    counts = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    names = list(shapes)
    for slabs in geometry.ranks:
        for row in slabs.pieces.tolist():
            name = names[row[0]]
            front = MAX_DIMS - len(shapes[name])
            start, extent = row[1 + front : 1 + MAX_DIMS], row[1 + MAX_DIMS + front :]
            counts[name][tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))] += 1
    return counts


def masks(shapes: Shapes, layouts: list[RankLayout]) -> dict[str, np.ndarray]:
    """The elements that layouts hold."""
    found = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
    for piece in (piece for layout in layouts for piece in layout.pieces if piece.tensor in shapes):
        inside(found[piece.tensor], piece.box)[...] = True
    return found


@given(cases(), SIZES)
@settings(max_examples=examples(40), deadline=None)
def test_every_element_that_is_read_is_written_once_by_a_rank_that_holds_it(case: Case, sizes: tuple[int, int]) -> None:
    shapes, source, destination = case
    made = divide(shapes, source, destination, slab_bytes=sizes[0], object_bytes=sizes[1])
    wanted, found = masks(shapes, destination), counted(shapes, geometry_of(made))
    assert all((found[name] == wanted[name]).all() for name in shapes)
    for rank, share in made.shares.items():
        slabs = share.slabs
        assert (slabs.slab_bytes <= max(sizes[0], 8)).all() or (np.diff(slabs.firsts)[slabs.slab_bytes > sizes[0]] == 1).all()
        assert (slabs.slab_offsets % 8 == 0).all()
        alone = divide(shapes, source, destination, ranks=[rank], slab_bytes=sizes[0], object_bytes=sizes[1]).shares[rank].slabs
        assert (alone.pieces == slabs.pieces).all()
        assert (alone.objects == slabs.objects).all(), "a rank that computes only its own share finds the same"


@given(cases(), SIZES, st.sampled_from([1, 64, 4096]))
@settings(max_examples=examples(40), deadline=None)
def test_a_rank_reads_its_own_ranges_and_gets_every_byte_once(
    tmp_path_factory: pytest.TempPathFactory, case: Case, sizes: tuple[int, int], range_bytes: int
) -> None:
    shapes, source, destination = case
    values = numbered(shapes)
    made = divide(shapes, source, destination, slab_bytes=sizes[0], object_bytes=sizes[1])
    geometry = decode(geometry_of(made).encode(), "geometry")
    store = opened(tmp_path_factory.mktemp("store"))
    parts = [ShareWriter(made.tensors, made.shares[one.rank], store).write(filled(one, values)) for one in sorted(source, key=by_rank)]
    publish(store, VersionId(0, 1), geometry, parts)
    manifest = store.newest()
    assert manifest is not None
    for layout in destination:
        reader = ShardReader(store, geometry, layout, range_bytes=range_bytes)
        asked = counting(store.files)
        got = blank(layout)
        assert reader.read(manifest, got) == reader.plan.nbytes == sum(asked)
        store.files.read = asked.before  # type: ignore[method-assign]
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[name], expected)
        held = 4 * sum(int(mask.sum()) for mask in masks(shapes, [layout]).values())
        assert held == sum(4 * geometry.table.storages[slab].size for slab in reader.plan.slabs), "nothing else is in its slabs"
        assert held <= reader.plan.nbytes < held + 8 * len(reader.plan.slabs) + 1


def by_rank(layout: RankLayout) -> int:
    return layout.rank


class counting(list[int]):
    """The bytes of every read."""

    def __init__(self, files: object) -> None:
        super().__init__()
        self.before = files.read  # type: ignore[attr-defined]

        def read(name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
            self.append(nbytes or 0)
            found: bytes | None = self.before(name, begin, nbytes)
            return found

        files.read = read  # type: ignore[attr-defined]


def test_what_a_reader_reads_is_what_it_holds() -> None:
    """For the layouts that the version was divided for, but for the few bytes that align slabs."""
    made, geometry = sharing(slab_bytes=1 << 20, object_bytes=1 << 20)
    for layout in readers():
        held = sum(storage.nbytes for storage in layout.storages.values())
        plan = plan_read(geometry, layout)
        assert held <= plan.nbytes < held + 8 * len(plan.slabs)
        assert plan.each_once
        assert len(plan.ranges) <= 2 * len(made.shares), "neighbouring slabs are read together"


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_layout_that_the_version_was_not_divided_for_reads_whole_slabs(tmp_path: Path, ranks: int) -> None:
    made, geometry = sharing()
    values, store = numbered(SHAPES), opened(tmp_path)
    parts = [ShareWriter(made.tensors, made.shares[one.rank], store).write(filled(one, values)) for one in trainers()]
    publish(store, VersionId(0, 1), geometry, parts)
    manifest = store.newest()
    assert manifest is not None
    for layout in readers(ranks) if ranks != 3 else [odd()]:
        got = blank(layout)
        ShardReader(store, geometry, layout).read(manifest, got)
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[name], expected)


def test_a_rank_that_holds_an_element_twice_reads_it_all_the_same(tmp_path: Path) -> None:
    """As many elements as the slab has, but not the same ones: the digest of the shard is no sum of slabs then."""
    made, geometry = sharing(slab_bytes=1 << 20, object_bytes=1 << 20)
    values, store = numbered(SHAPES), opened(tmp_path)
    parts = [ShareWriter(made.tensors, made.shares[one.rank], store).write(filled(one, values)) for one in trainers()]
    publish(store, VersionId(0, 1), geometry, parts)
    manifest = store.newest()
    assert manifest is not None
    builder = LayoutBuilder(0, "int32")
    builder.stack("norms", [("norm", Box((0,), (4,)))])
    builder.stack("again", [("norm", Box((0,), (4,)))])
    layout = builder.build()
    reader, got = ShardReader(store, geometry, layout), blank(layout)
    assert not reader.plan.each_once
    reader.read(manifest, got)
    assert got["norms"].tolist() == got["again"].tolist() == values["norm"][:4].tolist()


def odd() -> RankLayout:
    """Columns that no slab begins at."""
    builder = LayoutBuilder(0, "int32")
    builder.stack("down", [("down", Box((1, 5), (5, 20)))])
    return builder.build()


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_ranks_that_hold_the_same_share_the_writing(replicas: int) -> None:
    shapes: Shapes = {"a": (4096, 64), "b": (1024, 256), "c": (64,)}
    held, read = LayoutBuilder(0, "int32"), LayoutBuilder(0, "int32")
    for name, shape in shapes.items():
        held.stack(name, [(name, Box((0,) * len(shape), shape))])
        read.stack(name, [(name, Box((0,) * len(shape), (shape[0] // 2, *shape[1:])))])
    layout = held.build()
    written = [
        int(share.slabs.piece_bytes.sum())
        for share in divide(shapes, [layout.at(rank) for rank in range(replicas)], [read.build()]).shares.values()
    ]
    assert sum(written) == sum(2 * math.prod(shape) for shape in shapes.values()), "what no reader holds is not written"
    assert max(written) <= 1.05 * sum(written) / replicas


def test_an_element_that_nobody_holds_is_named() -> None:
    with pytest.raises(LayoutError, match=r"no source for \[12:24, 0:8\] of embedding"):
        divide(SHAPES, trainers()[:1], readers())


def test_readers_that_disagree_about_a_dtype_are_refused() -> None:
    other = LayoutBuilder(5, "int16")
    other.stack("norm", [("norm", Box((0,), SHAPES["norm"]))])
    with pytest.raises(LayoutError, match="tensor norm: got int32 and int16, expected one dtype in all readers"):
        divide(SHAPES, trainers(), [*readers(), other.build()])


def test_a_tensor_that_the_version_lacks_is_named() -> None:
    builder = LayoutBuilder(0, "int32")
    builder.stack("gate", [("gate", Box((0,), (4,)))])
    with pytest.raises(LayoutError, match=r"tensor gate box .* an unknown tensor"):
        plan_read(sharing()[1], builder.build())


@given(st.data())
@settings(max_examples=examples(80), deadline=None)
def test_a_damaged_manifest_is_refused_and_a_damaged_geometry_raises_nothing_else(data: st.DataObject) -> None:
    """Whatever one byte is changed to, or wherever the file ends. The digest of a geometry is its name, which the store compares."""
    geometry = sharing()[1].encode()
    manifest = VersionManifest("run", VersionId(0, 3), "a" * 64, ((), ())).encode()
    whole, read = data.draw(st.sampled_from([(geometry, decode), (manifest, manifests.decode)]))
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = data.draw(st.sampled_from([whole[:at], whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]]))
    try:
        read(changed, "file")  # type: ignore[operator]
    except DataError:
        return
    assert read is decode or changed == whole
