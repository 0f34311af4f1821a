"""Versions between the layouts of every family's trainers and engines, at small sizes: bit for bit what an exchange brings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_cases import of_every_family
from reshard_ranks import Arrays, blank, filled, numbered, run_ranks
from test_reshard_delta_float8 import Quantised, stepped
from test_reshard_float8 import empty

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.reshard import RankLayout, plan
from asyncmoe.version_store import Geometry, HeldVersion, ShardReader, ShareWriter, VersionId, VersionStore, divide, publish
from tests.unit.version_stores import opened

GRIDS = {
    "1 -> 1": (MegatronParallel(), EngineParallel()),
    "tp2pp2ep2 -> tp2ep2": (MegatronParallel(tp=2, pp=2, ep=2, dp=2, te=True), EngineParallel(tp=2, ep=2)),
    "dp3 -> tp4": (MegatronParallel(dp=3), EngineParallel(tp=4)),
}
Shapes = Mapping[str, tuple[int, ...]]


def written(
    folder: Path, shapes: Shapes, source: list[RankLayout], readers: Iterable[RankLayout], held: Mapping[int, Arrays]
) -> VersionStore:
    """A store with a version, of which every rank computed only its own share."""
    store, readers = opened(folder), list(readers)
    parts = []
    for layout in source:
        mine = divide(shapes, source, readers, ranks=[layout.rank])
        parts.append(ShareWriter(mine.tensors, mine.shares[layout.rank], store).write(held[layout.rank]))
    whole = divide(shapes, source, readers)
    publish(store, VersionId(0, 1), Geometry(whole.tensors, tuple(share.slabs for share in whole.shares.values())), parts)
    return store


def read(store: VersionStore, layout: RankLayout, arrays: Arrays) -> ShardReader:
    manifest = store.newest()
    assert manifest is not None
    reader = ShardReader(store, store.geometry(manifest.geometry), layout)
    assert reader.read(manifest, arrays) == reader.plan.nbytes
    return reader


@of_every_family(GRIDS, "tp2pp2ep2 -> tp2ep2")
def test_every_family(tmp_path: Path, hf: dict[str, Any], trainer: MegatronParallel, engine: EngineParallel) -> None:
    """Engines that the version was divided for read what they hold; one of another shape reads it, too."""
    family = family_of(hf)
    shapes = family.tensors(hf)
    source = family.megatron_layouts(hf, trainer, "float32")
    values = numbered(shapes, np.float32)
    readers = family.sglang_layouts(hf, engine, "float32")
    store = written(tmp_path, shapes, source, readers, {layout.rank: filled(layout, values, np.float32) for layout in source})
    for layout in (*readers, *family.sglang_layouts(hf, EngineParallel(tp=2), "float32")):
        got = blank(layout, np.float32)
        reader = read(store, layout, got)
        for name, expected in filled(layout, values, np.float32).items():
            np.testing.assert_array_equal(got[name], expected)
        if layout in readers:
            held = sum(storage.nbytes for storage in layout.storages.values())
            assert reader.plan.nbytes <= held + 8 * len(reader.plan.slabs)


@pytest.mark.parametrize(("dtype", "float8"), [("float32", False), ("float32", True), ("bfloat16", True)])
def test_weights_are_rounded_and_quantised_as_an_exchange_does(tmp_path: Path, dtype: str, float8: bool) -> None:
    case = Quantised(dtype, float8)
    case.load()
    dense = {layout.rank: empty(layout) for layout in case.destination}
    run_ranks(plan(case.shapes, case.source, case.destination), case.held, dense)
    store = written(tmp_path, case.shapes, case.source, case.destination, case.held)
    for layout in case.destination:
        got = empty(layout)
        reader = read(store, layout, got)
        assert reader.plan.each_once
        for name, expected in dense[layout.rank].items():
            np.testing.assert_array_equal(got[name].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("dtype", "float8"), [("float32", False), ("float32", True), ("bfloat16", True)])
def test_deltas_of_rounded_and_quantised_weights_are_what_an_exchange_brings(tmp_path: Path, dtype: str, float8: bool) -> None:
    """Steps in the trainer's dtype, of which few or all reach what engines serve; scales change with them."""
    case, store = Quantised(dtype, float8), opened(tmp_path)
    made = divide(case.shapes, case.source, case.destination)
    geometry = Geometry(made.tensors, tuple(made.shares[one.rank].slabs for one in case.source))
    writers = {one.rank: ShareWriter(made.tensors, made.shares[one.rank], store, full_every=100) for one in case.source}
    readers = {layout.rank: ShardReader(store, geometry, layout) for layout in case.destination}
    held: dict[int, HeldVersion] = {}
    whole = sum(int(slabs.object_bytes.sum()) for slabs in geometry.ranks)
    for step, (size, share) in enumerate([(0.0, 1.0), (1e-2, 0.01), (1e-5, 1.0), (1e-2, 0.001), (0.5, 1.0), (1e-2, 0.001)]):
        stepped(case.values, size, share, step)
        case.load()
        publish(store, VersionId(0, step), geometry, [writer.write(case.held[rank]) for rank, writer in writers.items()])
        manifest = store.newest()
        assert manifest is not None
        dense = {layout.rank: empty(layout) for layout in case.destination}
        run_ranks(case.plan, case.held, dense)
        for layout in case.destination:
            got = empty(layout)
            found = readers[layout.rank].read(manifest, got, held=held.get(layout.rank))
            assert (found < whole / 10) == (size in (1e-2, 1e-5))
            for name, expected in dense[layout.rank].items():
                np.testing.assert_array_equal(got[name].view(np.uint8), expected.view(np.uint8))
            held[layout.rank] = HeldVersion(manifest, got)
