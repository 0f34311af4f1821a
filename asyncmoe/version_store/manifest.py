"""The manifest of a version: which objects it consists of, and their digests. A version exists if its manifest does.

A manifest names everything that its version needs: of an object that was written whole in an earlier version, all deltas since.

The file is a line of JSON and a line with the BLAKE2b digest of the first, so that half a file is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from asyncmoe.errors import DataError

FORMAT = 2
MOST_BYTES = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"versions/(\d{4,})-(\d{8,})\.json")


@dataclass(frozen=True, order=True)
class VersionId:
    """Which version: its lineage (number of restarts that trained steps again) and step. Later ones compare greater."""

    lineage: int
    step: int

    @property
    def name(self) -> str:
        """Name of the manifest."""
        return f"versions/{self.lineage:04d}-{self.step:08d}.json"

    def __str__(self) -> str:
        return f"version {self.step} of lineage {self.lineage}"


@dataclass(frozen=True)
class StoredDelta:
    """What changed in an object, coded slab by slab (`asyncmoe.reshard.delta_format`), as a file.

    Attributes:
        digest: BLAKE2b-256 in hex of its bytes.
        parts: bytes of each slab's part, in the order of the slabs; 0: the slab did not change.
    """

    digest: str
    parts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of its file."""
        return object_name(self.digest)

    @property
    def nbytes(self) -> int:
        """Bytes of its file."""
        return sum(self.parts)


@dataclass(frozen=True)
class StoredObject:
    """An object of a version: a file with the whole of it, and deltas.

    Attributes:
        digest: BLAKE2b-256 in hex of the bytes of the whole.
        nbytes: of the whole.
        slabs: canonical digest of each of its slabs (`asyncmoe.reshard.delta_digest`) in this version.
        deltas: what changed in it, oldest first.
        former: empty if the first of `deltas` changes the whole. Else the whole has that delta in it, and `former` is the `state` that
            the delta changes: for readers that have that in memory.
    """

    digest: str
    nbytes: int
    slabs: tuple[int, ...]
    deltas: tuple[StoredDelta, ...] = ()
    former: str = ""

    @property
    def name(self) -> str:
        """Name of the file with the whole."""
        return object_name(self.digest)

    @property
    def state(self) -> str:
        """Name of its content in this version: the digest of the delta that made it, or of the whole."""
        return self.deltas[-1].digest if self.deltas else self.digest

    @property
    def chain(self) -> tuple[StoredDelta, ...]:
        """The deltas that make this version of the whole."""
        return self.deltas[1:] if self.former else self.deltas

    def since(self, state: str) -> tuple[StoredDelta, ...] | None:
        """Return the deltas that make this version of a former content; None if it does not follow from that."""
        states = [self.former or self.digest, *(one.digest for one in self.deltas)]
        return self.deltas[states.index(state) :] if state in states else None


@dataclass(frozen=True)
class VersionManifest:
    """A version.

    Attributes:
        run: identity of the run that wrote it.
        geometry: digest of the object with its geometry.
        ranks: the objects of each rank of the geometry.
    """

    run: str
    version: VersionId
    geometry: str
    ranks: tuple[tuple[StoredObject, ...], ...]

    @property
    def objects(self) -> set[str]:
        """Names of all files that it needs."""
        stored = [one for rank in self.ranks for one in rank]
        return {object_name(self.geometry)} | {one.name for one in stored} | {delta.name for one in stored for delta in one.deltas}

    @property
    def nbytes(self) -> int:
        """Bytes of its objects, without the geometry."""
        return sum(one.nbytes + sum(delta.nbytes for delta in one.deltas) for rank in self.ranks for one in rank)

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        rows = [objects_to_json(rank) for rank in self.ranks]
        told = {"format": FORMAT, "run": self.run, "lineage": self.version.lineage, "step": self.version.step}
        return sealed(json.dumps({**told, "geometry": self.geometry, "ranks": rows}, separators=(",", ":")).encode())


def digest_of(data: bytes | memoryview) -> str:
    """Return the BLAKE2b-256 digest of bytes in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def object_name(digest: str) -> str:
    """Return the name of the file with the object of a digest."""
    return f"objects/{digest[:2]}/{digest}"


def version_of(name: str) -> VersionId | None:
    """Return which version a file is the manifest of; None if it is none."""
    found = _NAME.fullmatch(name)
    return None if found is None else VersionId(int(found[1]), int(found[2]))


def sealed(line: bytes) -> bytes:
    """Return a line and its digest, each ended by a newline."""
    return b"%s\n%s\n" % (line, digest_of(line).encode())


def opened(data: bytes, where: str, what: str) -> bytes:
    """Return the line that `sealed` was given.

    Raises:
        DataError: a part is missing or altered.
    """
    line, _, rest = data.partition(b"\n")
    if rest != digest_of(line).encode() + b"\n":
        raise DataError(where, got=f"{len(data)} bytes without the digest of their content", expected=f"{what}, as it was written")
    return line


def objects_to_json(objects: tuple[StoredObject, ...]) -> list[list[object]]:
    """Return objects as values of JSON."""
    return [
        [one.digest, one.nbytes, "".join(f"{slab:016x}" for slab in one.slabs), [[d.digest, d.parts] for d in one.deltas], one.former]
        for one in objects
    ]


def objects_from_json(rows: list[list[object]]) -> tuple[StoredObject, ...]:
    """Return the objects that `objects_to_json` was given. Raise ValueError or TypeError for anything else."""
    return tuple(_object(*row) for row in rows)


def _object(digest: object, nbytes: object, slabs: object, deltas: object, former: object) -> StoredObject:
    if not (isinstance(slabs, str) and isinstance(deltas, list) and isinstance(former, str)):
        raise ValueError("an object without slabs or deltas")
    if len(slabs) % 16:
        raise ValueError("digests of slabs that are cut off")
    if former and not deltas:
        raise ValueError("a former object without a delta")
    count = len(slabs) // 16
    made = tuple(StoredDelta(_digest(name), _parts(parts, count)) for name, parts in deltas)
    numbers = tuple(int(slabs[at : at + 16], 16) for at in range(0, len(slabs), 16))
    return StoredObject(_digest(digest), _size(nbytes), numbers, made, former and _digest(former))


def _digest(value: object) -> str:
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise ValueError("an object without a digest")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("an object without a size")
    return value


def _parts(parts: object, slabs: int) -> tuple[int, ...]:
    if not isinstance(parts, list) or len(parts) != slabs:
        raise ValueError(f"a delta without a part for each of {slabs} slabs")
    return tuple(_size(one) for one in parts)


def decode(data: bytes, where: str) -> VersionManifest:
    """Return the manifest in a file.

    Args:
        where: names the file, for errors.

    Raises:
        DataError: it is none, or damaged.
    """
    line = opened(data, where, "the manifest of a weight version")
    try:
        told = json.loads(line)
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}")
        ranks = tuple(objects_from_json(rank) for rank in told["ranks"])
        if not _DIGEST.fullmatch(told["geometry"]):
            raise ValueError("no geometry")
        return VersionManifest(str(told["run"]), VersionId(int(told["lineage"]), int(told["step"])), told["geometry"], ranks)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(where, got=f"{' '.join(str(error).split())[:200]}", expected="the manifest of a weight version") from error
