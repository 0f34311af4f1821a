"""Reads a worker's shards of weight versions from a version store."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncmoe.errors import DataError
from asyncmoe.receiver import transfer_plan
from asyncmoe.receiver.file_keys import KEY
from asyncmoe.receiver.protocol import Header, StoreTerms, Terms
from asyncmoe.version_store import HeldVersion, ShardReader, VersionId, VersionManifest, VersionStore, open_files


class Puller:
    """Reads versions of one meeting.

    Args:
        rank: the worker's rank in the meeting.
        served: the version that the worker's parameters hold, as `served` of the meeting before; None: unknown.

    Attributes:
        served: the version that the worker's parameters hold, as far as is known. Of the next one only what changed since is read; all that
            is used of it is verified first.

    Raises:
        UserError: the store's URL cannot be opened here.
    """

    def __init__(self, terms: Terms, place: StoreTerms, rank: int, served: VersionManifest | None = None) -> None:
        self.served = served
        self._pulled: VersionManifest | None = None
        self._timeout_s, self._lineage = terms.timeout_s, place.lineage
        self._store = VersionStore(open_files(place.url, KEY, terms.timeout_s), place.run)
        self._layout = next(layout for layout in transfer_plan.engine_layouts(terms) if layout.rank == rank)
        self._geometry = ""
        self._reader: ShardReader | None = None

    def pull(self, header: Header, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Read a version into tensors by the names of the worker's parameters, and verify it.

        Args:
            parameters: the worker's own, which are read if they hold a version that this one follows.

        Raises:
            DataError: the version or one of its objects is missing or damaged.
            LayoutError: it lacks a parameter, or the tensors are not in host memory.
            AsyncmoeError: the store fails, or is too slow.
        """
        version = VersionId(self._lineage, header.version)
        manifest = self._store.manifest(version, header.manifest)
        if manifest is None:
            raise DataError(f"{self._store.files.shown}/{version.name}", got="no such file", expected=f"the manifest of {version}")
        if self._reader is None or manifest.geometry != self._geometry:
            self._reader = ShardReader(self._store, self._store.geometry(manifest.geometry), self._layout)
            self._geometry = manifest.geometry
        held = None if self.served is None else HeldVersion(self.served, parameters)
        self._reader.read(manifest, tensors, held=held, timeout_s=self._timeout_s)
        self._pulled = manifest

    def committed(self, version: int) -> None:
        """Note that the version that was read last has become the worker's parameters."""
        pulled = self._pulled
        self.served = pulled if pulled is not None and pulled.version.step == version else None
