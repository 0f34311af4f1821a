"""Versions in a directory, whole and as deltas: the bytes that trainer ranks write and engine ranks read, and the seconds that takes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.models import family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard import RankLayout
from asyncmoe.version_store import (
    Folder,
    Geometry,
    HeldVersion,
    ShardReader,
    ShareWriter,
    VersionId,
    VersionManifest,
    VersionStore,
    divide,
    publish,
)
from benchmarks import reshard
from benchmarks.provenance import here

PERCENTS = (0.3, 1.0, 3.0)
CHAIN = 8
"""Versions in a row of which an engine that comes late reads the deltas."""
MODEL: dict[str, Any] = {
    **reshard.MODEL, "num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 2, "vocab_size": 8192, "hidden_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "moe_intermediate_size": 256,
}  # fmt: skip
"""53 MB in bfloat16."""


def run(hf: dict[str, Any] | None = None) -> dict[str, Any]:
    """Versions of two trainer ranks (tp 2), read by two engine ranks (tp 2), with a share of elements changed at random.

    Returns:
        {"date", "machine", "load", "whole", "percents", "late"}. "whole" is the first version, an entry of "percents" one that follows
        another: "written" and "read" (bytes, of all ranks together, manifests included), "write_seconds" and "read_seconds" (all ranks one
        after the other, one thread each; the files are in the cache of the machine). An entry also has "percent", and "share_written" and
        "share_read" of "whole". "late": what engine ranks that start from nothing read after `CHAIN` versions of 1 % as deltas.

    Raises:
        InvariantBroken: an engine rank has other weights than the trainer.
    """
    measured_at = here()
    with tempfile.TemporaryDirectory() as folder:
        case = _Case(hf or MODEL, Path(folder))
        whole = case.update(0.0)
        percents = []
        for percent in PERCENTS:
            one = case.update(percent)
            shares = {f"share_{what}": one[what] / whole[what] for what in ("written", "read")}
            percents.append({"percent": percent, **one, **shares})
        case.start_again()
        for _ in range(CHAIN + 1):
            case.update(1.0)
        late = case.late()
    return {**measured_at, "whole": whole, "percents": percents, "late": {**late, "share_read": late["read"] / whole["read"]}}


class _Counted(Folder):
    """Counts the bytes of files."""

    written = read_ = 0

    def write(self, name: str, data: bytes | memoryview) -> None:
        super().write(name, data)
        self.written += len(data)

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes | None:
        found = super().read(name, begin, nbytes)
        self.read_ += len(found or b"")
        return found


class _Case:
    """The ranks, their arrays, and the store between them."""

    def __init__(self, hf: dict[str, Any], folder: Path) -> None:
        family = family_of(hf)
        shapes = family.tensors(hf)
        parallel = MegatronParallel(tp=2)
        self._sources = [family.megatron_layout(hf, parallel, rank, "bfloat16") for rank in range(parallel.world)]
        self._readers = [family.sglang_layout(hf, EngineParallel(tp=2), rank, "bfloat16") for rank in range(2)]
        self._sharing = divide(shapes, self._sources, self._readers)
        self._geometry = Geometry(self._sharing.tensors, tuple(self._sharing.shares[one.rank].slabs for one in self._sources))
        self.files = _Counted(folder)
        self._store = VersionStore(self.files, "bench")
        self._generator = np.random.default_rng(0)
        self._held = [self._random(layout) for layout in self._sources]
        self._reader = [ShardReader(self._store, self._geometry, layout) for layout in self._readers]
        self._served: list[HeldVersion | None] = [None, None]
        self._version = 0
        self.start_again()

    def start_again(self) -> None:
        """New writers, whose first version is whole."""
        self._writers = [
            ShareWriter(self._sharing.tensors, self._sharing.shares[one.rank], self._store, full_every=1000) for one in self._sources
        ]

    def _random(self, layout: RankLayout) -> dict[str, np.ndarray]:
        found = {}
        for name, storage in layout.storages.items():
            value = self._generator.standard_normal(storage.size, np.float32) * np.float32(0.02)
            found[name] = (value.view(np.uint32) >> 16).astype(np.uint16)
        return found

    def update(self, percent: float) -> dict[str, float]:
        """Change a share of the elements, write a version, and have the engine ranks read it."""
        for array in (array for arrays in self._held for array in arrays.values()):
            places = self._generator.integers(0, array.size, round(percent / 100 * array.size))
            array[places] ^= self._generator.integers(1, 128, len(places)).astype(np.uint16)
        self._version += 1
        self.files.written = self.files.read_ = 0
        started = time.perf_counter()
        parts = [writer.write(arrays) for writer, arrays in zip(self._writers, self._held, strict=True)]
        publish(self._store, VersionId(0, self._version), self._geometry, parts)
        written = time.perf_counter()
        for rank, reader in enumerate(self._reader):
            self._served[rank] = self._read(reader, self._readers[rank], self._served[rank])
        ended = time.perf_counter()
        return {
            "written": self.files.written,
            "read": self.files.read_,
            "write_seconds": written - started,
            "read_seconds": ended - written,
        }

    def late(self) -> dict[str, float]:
        """Read the newest version with nothing in memory, and compare it with what is served."""
        self.files.read_ = 0
        started = time.perf_counter()
        found = [self._read(reader, layout, None) for reader, layout in zip(self._reader, self._readers, strict=True)]
        seconds = time.perf_counter() - started
        for new, served in zip(found, self._served, strict=True):
            assert served is not None
            if any((np.asarray(array) != np.asarray(served.arrays[name])).any() for name, array in new.arrays.items()):
                raise InvariantBroken("an engine rank that came late has other weights than one that followed")
        return {"read": self.files.read_, "read_seconds": seconds}

    def _read(self, reader: ShardReader, layout: RankLayout, held: HeldVersion | None) -> HeldVersion:
        manifest = self._store.manifest(VersionId(0, self._version))
        if not isinstance(manifest, VersionManifest):
            raise InvariantBroken(f"version {self._version} was written, and is not there")
        arrays = {name: np.zeros(storage.size, np.uint16) for name, storage in layout.storages.items()}
        reader.read(manifest, arrays, held=held)
        return HeldVersion(manifest, arrays)


def table(results: dict[str, Any]) -> str:
    """The results as lines of text."""
    whole, late = results["whole"], results["late"]
    lines = [
        " changed     written  of whole        read  of whole   write    read",
        f"   whole {whole['written'] / 1e6:8.2f} MB    100.0% {whole['read'] / 1e6:8.2f} MB    100.0% "
        f"{whole['write_seconds']:6.2f}s {whole['read_seconds']:6.2f}s",
    ]
    for one in results["percents"]:
        lines.append(
            f"{one['percent']:7.1f}% {one['written'] / 1e6:8.2f} MB {one['share_written']:9.2%} {one['read'] / 1e6:8.2f} MB "
            f"{one['share_read']:9.2%} {one['write_seconds']:6.2f}s {one['read_seconds']:6.2f}s"
        )
    return "\n".join([*lines, f"late: {late['read'] / 1e6:.2f} MB, {late['share_read']:.1%}, after {CHAIN} versions of 1 % as deltas"])
