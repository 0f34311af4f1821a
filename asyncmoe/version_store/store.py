"""A version store: weight versions of one run as files.

    run.json                            which run it belongs to
    objects/9f/9f86d081...              weights, changes of weights, or a geometry, named by their digest; written once, never changed
    versions/0000-00000012.json         manifest of version 12 of lineage 0, written last

An object that is there already, with the digest in its name, is not written again. Half a version is none: nothing reads objects but
through a manifest.
"""

from __future__ import annotations

import json

from asyncmoe.errors import DataError
from asyncmoe.version_store import geometry as geometries
from asyncmoe.version_store import manifest as manifests
from asyncmoe.version_store.files import StoreFiles
from asyncmoe.version_store.geometry import Geometry
from asyncmoe.version_store.manifest import VersionId, VersionManifest, digest_of, object_name

RUN = "run.json"
_MOST_RUN_BYTES = 4096


class VersionStore:
    """The versions of a run in some files. For one thread, but for `put` and `read_object`.

    Args:
        run: identity of the run.
    """

    def __init__(self, files: StoreFiles, run: str) -> None:
        self.files, self.run = files, run

    def claim(self) -> None:
        """Make the store this run's, if it is nobody's.

        Raises:
            DataError: it is another run's.
            AsyncmoeError: see `StoreFiles`.
        """
        if (data := self.files.read(RUN, 0, _MOST_RUN_BYTES)) is None:
            self.files.write(RUN, manifests.sealed(json.dumps({"run": self.run}).encode()))
            return
        where = f"{self.files.shown}/{RUN}"
        line = manifests.opened(data, where, "the name of a run")
        try:
            owner = str(json.loads(line)["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(where, got="a damaged file", expected="the name of a run") from error
        if owner != self.run:
            hint = "give every run a store of its own, or delete the other run's"
            raise DataError(f"version store {self.files.shown}", got=f"versions of run {owner}", expected=f"of run {self.run}", hint=hint)

    def put(self, data: bytes | memoryview, known: str = "") -> str:
        """Write an object unless it is there; return its digest. One that is there is read, and written again if it is damaged.

        Args:
            known: digest of an object that this process has put before; it is not read if it is there in its size.

        Raises:
            StorageError, WaitTimeout, AsyncmoeError: see `StoreFiles`.
        """
        digest = digest_of(data)
        name = object_name(digest)
        there = self.files.size(name) == len(data)
        if there and digest != known:
            there = digest_of(self.files.read(name, 0, len(data)) or b"") == digest
        if not there:
            self.files.write(name, data)
        return digest

    def publish(self, manifest: VersionManifest) -> str:
        """Write a manifest, whose objects are all there, and return the digest of its file: from now on the version exists."""
        data = manifest.encode()
        self.files.write(manifest.version.name, data)
        return digest_of(data)

    def versions(self) -> list[VersionId]:
        """Return the versions that have a manifest, ascending."""
        return sorted(found for name in self.files.names("versions") if (found := manifests.version_of(name)) is not None)

    def manifest(self, version: VersionId, digest: str | None = None) -> VersionManifest | None:
        """Return the manifest of a version; None if there is none.

        Args:
            digest: the digest of the file, if it is known: a version that was written again has another.

        Raises:
            DataError: it is damaged, is another run's, or has another digest.
            AsyncmoeError: see `StoreFiles`.
        """
        where = f"{self.files.shown}/{version.name}"
        if (data := self._small(version.name, manifests.MOST_BYTES)) is None:
            return None
        if digest is not None and digest_of(data) != digest:
            raise DataError(where, got=f"a file of digest {digest_of(data)[:16]}", expected=f"{digest[:16]}, as the trainer announced it")
        found = manifests.decode(data, where)
        if found.run != self.run or found.version != version:
            raise DataError(where, got=f"{found.version} of run {found.run}", expected=f"{version} of run {self.run}")
        return found

    def newest(self) -> VersionManifest | None:
        """Return the manifest of the newest version that has one; None if there is none. A damaged manifest is no version."""
        for version in reversed(self.versions()):
            try:
                found = self.manifest(version)
            except DataError:
                continue  # cut off by a place that does not write files at once
            if found is not None:
                return found
        return None

    def geometry(self, digest: str) -> Geometry:
        """Return a geometry.

        Raises:
            DataError: it is missing or damaged.
            AsyncmoeError: see `StoreFiles`.
        """
        name = object_name(digest)
        where = f"{self.files.shown}/{name}"
        if (data := self._small(name, geometries.MOST_BYTES)) is None:
            raise DataError(where, got="no such file", expected="the geometry of a weight version")
        if digest_of(data) != digest:
            raise DataError(where, got=f"{len(data)} bytes of another digest than their name", expected="the object as it was written")
        return geometries.decode(data, where)

    def _small(self, name: str, most: int) -> bytes | None:
        """Return a whole file, whose size is checked before it is read; None if there is none."""
        if (size := self.files.size(name)) is None:
            return None
        if size > most:
            raise DataError(f"{self.files.shown}/{name}", got=f"{size} bytes", expected=f"at most {most}")
        return self.files.read(name, 0, size)
