"""Versions of a few small ranks in a store, for tests: also a program that writes them one after the other, to be killed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from asyncmoe.reshard import Box, LayoutBuilder, RankLayout
from asyncmoe.version_store import Folder, Geometry, ShareWriter, StoreFiles, VersionId, VersionStore, divide, publish
from asyncmoe.version_store.share import Sharing
from tests.unit.reshard_ranks import Arrays, filled, numbered

RUN = "run-a"
SHAPES: dict[str, tuple[int, ...]] = {"embedding": (24, 8), "up": (32, 8), "down": (8, 32), "norm": (8,)}


def trainers(ranks: int = 2) -> list[RankLayout]:
    """Ranks that split rows of the large tensors, and all hold the norm."""
    made = []
    for rank in range(ranks):
        builder = LayoutBuilder(rank, "int32")
        for name in ("embedding", "up", "down"):
            rows, width = SHAPES[name]
            step = rows // ranks
            builder.stack(name, [(name, Box((rank * step, 0), (step, width)))])
        builder.stack("norm", [("norm", Box((0,), SHAPES["norm"]))])
        made.append(builder.build())
    return made


def readers(ranks: int = 2) -> list[RankLayout]:
    """Ranks that split the columns of one tensor and the rows of the others."""
    made = []
    for rank in range(ranks):
        builder = LayoutBuilder(rank, "int32")
        for name in ("embedding", "up"):
            step = SHAPES[name][0] // ranks
            builder.stack(name, [(name, Box((rank * step, 0), (step, 8)))])
        step = 32 // ranks
        builder.stack("down", [("down", Box((0, rank * step), (8, step)))])
        builder.stack("norm", [("norm", Box((0,), SHAPES["norm"]))])
        made.append(builder.build())
    return made


def values_of(version: int) -> Arrays:
    """The tensors of a version."""
    return {name: value * 1000 + version for name, value in numbered(SHAPES).items()}


def sharing(sources: Sequence[RankLayout] | None = None, **sizes: int) -> tuple[Sharing, Geometry]:
    """What ranks write, and the geometry."""
    made = divide(SHAPES, sources or trainers(), readers(), **({"slab_bytes": 256, "object_bytes": 512} | sizes))
    return made, Geometry(made.tensors, tuple(share.slabs for share in made.shares.values()))


def write(store: VersionStore, version: VersionId, values: Mapping[str, np.ndarray] | None = None) -> str:
    """Write a whole version, all ranks one after the other; return the digest of its manifest."""
    made, geometry = sharing()
    values = values_of(version.step) if values is None else values
    parts = [
        ShareWriter(made.tensors, share, store).write(filled(layout, values))
        for share, layout in zip(made.shares.values(), trainers(), strict=True)
    ]
    return publish(store, version, geometry, parts)


def opened(files: StoreFiles | Path, run: str = RUN) -> VersionStore:
    """The store of a run."""
    return VersionStore(Folder(files, 10.0) if isinstance(files, Path) else files, run)


def main() -> None:
    """Write versions from a number on, for ever."""
    store = opened(Path(sys.argv[1]))
    version = int(sys.argv[2])
    store.claim()
    print("ready", flush=True)
    while True:
        write(store, VersionId(0, version))
        version += 1


if __name__ == "__main__":
    main()
