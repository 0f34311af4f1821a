"""Versions of a few small ranks in a store, for tests: also a program that writes them one after the other, to be killed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from asyncmoe.reshard import Box, LayoutBuilder, RankLayout
from asyncmoe.version_store import Folder, Geometry, ShareWriter, StoreFiles, VersionId, VersionStore, divide, publish
from asyncmoe.version_store.files import TEMPORARY
from asyncmoe.version_store.share import Sharing
from tests.unit.reshard_ranks import Arrays, filled, numbered

RUN = "run-a"
SHAPES: dict[str, tuple[int, ...]] = {"embedding": (24, 8), "up": (32, 8), "down": (8, 32), "norm": (8,)}
WIDE: dict[str, tuple[int, ...]] = {"embedding": (96, 64), "up": (128, 64), "down": (64, 128), "norm": (64,)}
"""Large enough that a delta is smaller."""
OF_WIDE = {"slab_bytes": 4096, "object_bytes": 16384}


def trainers(ranks: int = 2, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[RankLayout]:
    """Ranks that split rows of the large tensors, and all hold the norm."""
    made = []
    for rank in range(ranks):
        builder = LayoutBuilder(rank, "int32")
        for name in ("embedding", "up", "down"):
            rows, width = shapes[name]
            step = rows // ranks
            builder.stack(name, [(name, Box((rank * step, 0), (step, width)))])
        builder.stack("norm", [("norm", Box((0,), shapes["norm"]))])
        made.append(builder.build())
    return made


def readers(ranks: int = 2, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[RankLayout]:
    """Ranks that split the columns of one tensor and the rows of the others."""
    made = []
    for rank in range(ranks):
        builder = LayoutBuilder(rank, "int32")
        for name in ("embedding", "up"):
            rows, width = shapes[name]
            step = rows // ranks
            builder.stack(name, [(name, Box((rank * step, 0), (step, width)))])
        rows, width = shapes["down"]
        step = width // ranks
        builder.stack("down", [("down", Box((0, rank * step), (rows, step)))])
        builder.stack("norm", [("norm", Box((0,), shapes["norm"]))])
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


class Writers:
    """The ranks of a trainer, each with what it wrote last, of `WIDE` or other tensors."""

    def __init__(
        self, store: VersionStore, full_every: int, sources: Sequence[RankLayout] | None = None, made: Sharing | None = None
    ) -> None:
        self.store, self.sources = store, sources or trainers(2, WIDE)
        made = made or divide(WIDE, self.sources, readers(2, WIDE), **OF_WIDE)
        self.geometry = Geometry(made.tensors, tuple(share.slabs for share in made.shares.values()))
        self.ranks = {rank: ShareWriter(made.tensors, share, store, full_every=full_every) for rank, share in made.shares.items()}

    def write(self, version: VersionId, values: Mapping[str, np.ndarray]) -> str:
        """Write a whole version, all ranks one after the other; return the digest of its manifest."""
        layouts = {layout.rank: layout for layout in self.sources}
        parts = [writer.write(filled(layouts[rank], values)) for rank, writer in self.ranks.items()]
        return publish(self.store, version, self.geometry, parts)


def stepped(version: int) -> Arrays:
    """The tensors of `WIDE` in a version: about one element in a hundred differs from the version before."""
    values = numbered(WIDE)
    for value in values.values():
        for step in range(1, version + 1):
            value.reshape(-1)[step * 37 % 97 :: 97] += step
    return values


def opened(files: StoreFiles | Path, run: str = RUN) -> VersionStore:
    """The store of a run."""
    return VersionStore(Folder(files, 10.0) if isinstance(files, Path) else files, run)


def main() -> None:
    """Write versions from a number on, for ever. With two more arguments: whole every so many changes; and in the third version the process
    kills itself with a half of the so many-th file written, or of the manifest."""
    store = opened(Path(sys.argv[1]))
    version = int(sys.argv[2])
    store.claim()
    writers = Writers(store, int(sys.argv[3])) if len(sys.argv) > 3 else None
    print("ready", flush=True)
    for number in itertools.count(version):
        if writers is None:
            write(store, VersionId(0, number))
            continue
        if number == version + 2:
            store.files.write = dying(Path(sys.argv[1]), store.files.write, sys.argv[4])  # type: ignore[method-assign]
        writers.write(VersionId(0, number), stepped(number))


def dying(folder: Path, plain: Callable[[str, bytes], None], when: str) -> Callable[[str, bytes], None]:
    """`Folder.write`, in the middle of which the process dies."""
    files = itertools.count(1)

    def write(name: str, data: bytes) -> None:
        if (name.startswith("versions/") and when == "manifest") or str(next(files)) == when:
            half = (folder / name).with_name(f"{TEMPORARY}{when}")
            half.parent.mkdir(exist_ok=True)
            half.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        plain(name, data)

    return write


if __name__ == "__main__":
    main()
