"""Which files of a version store may go: all but the newest versions and what these refer to, once nobody can still be reading them.

Time is measured by the clock of the one process that deletes, from when it first saw that a file is not needed any more, so clocks that
differ between machines, and restarts, only make files stay longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from asyncmoe.errors import DataError
from asyncmoe.version_store.manifest import VersionId, version_of
from asyncmoe.version_store.store import VersionStore


def unneeded(files: Collection[str], needs: Mapping[VersionId, Collection[str]], keep: int) -> set[str]:
    """Return the names of the files that the newest `keep` versions do not need.

    Args:
        files: names of all objects and manifests.
        needs: of each of these versions, the names of its objects; a manifest in `files` that is not among them is damaged.
    """
    kept = sorted(needs)[-keep:]
    needed = {version.name for version in kept}.union(*(needs[version] for version in kept))
    return set(files) - needed


def due(superfluous: Collection[str], since: Mapping[str, float], now: float, grace_s: float) -> list[str]:
    """Return the files to delete now, manifests first: those that have been superfluous for `grace_s`."""
    old = [name for name in superfluous if now - since.get(name, now) >= grace_s]
    return sorted(old, key=lambda name: (version_of(name) is None, name))


@dataclass
class Retention:
    """Deletes what is not needed. Used by one process, while no rank writes a version.

    Attributes:
        keep: versions to keep, at least 1.
        grace_s: seconds for which a file stays when nothing needs it any more; longer than a reader takes for a version.
        since: when each such file was first seen, by `clock`.
    """

    store: VersionStore
    keep: int
    grace_s: float
    clock: Callable[[], float]
    since: dict[str, float] = field(default_factory=dict)

    def prune(self) -> list[str]:
        """Delete what is due; return the names. Raises what `StoreFiles` raises; what is left is deleted the next time."""
        files, now = self.store.files, self.clock()
        names = [*files.names("versions"), *files.names("objects")]
        needs: dict[VersionId, set[str]] = {}
        for version in sorted((found for name in names if (found := version_of(name)) is not None), reverse=True):
            if len(needs) == self.keep:
                break
            try:
                manifest = self.store.manifest(version)
            except DataError:
                continue
            if manifest is not None:
                needs[version] = manifest.objects
        superfluous = unneeded(names, needs, self.keep)
        self.since = {name: self.since.get(name, now) for name in superfluous}
        gone = due(superfluous, self.since, now, self.grace_s)
        for name in gone:
            files.delete(name)
            del self.since[name]
        return gone
