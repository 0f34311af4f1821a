"""Weight versions as files: in a directory, or wherever fsspec writes, for engines that have no path to the trainer.

A version on its way:

1. `cells.py` cuts the canonical tensors along the boxes of the readers' layouts; `share.py` decides which rank writes which cells
   (`divide`): one that holds them, the load levelled. `slabs.py` says how they lie in objects, `geometry.py` puts that into a file.
2. `writer.py`: every rank packs its share object by object and writes it (`ShareWriter`), under the name of its digest (`store.py`): whole,
   or as a delta to what it wrote last.
3. `writer.py`: one rank writes the manifest (`publish`, `manifest.py`); from then on the version exists.
4. `read_plan.py` decides which ranges of which objects a rank reads; `reader.py` reads them (`ShardReader`), or takes them from a version
   that the rank holds, applies deltas (`delta_reader.py`), verifies every slab against the manifest, and then the whole shard where it lies
   in the reader's memory.
5. `retention.py` deletes what the newest versions do not need.

`files.py` is a directory; `remote.py` is any other place, and the only part that needs fsspec. The rest needs NumPy and
`asyncmoe.reshard`. Weights are read and written in host memory.
"""

from asyncmoe.version_store.files import Folder, StoreFiles
from asyncmoe.version_store.geometry import Geometry
from asyncmoe.version_store.manifest import StoredDelta, StoredObject, VersionId, VersionManifest
from asyncmoe.version_store.reader import HeldVersion, ShardReader
from asyncmoe.version_store.remote import open_files
from asyncmoe.version_store.retention import Retention
from asyncmoe.version_store.share import divide
from asyncmoe.version_store.store import VersionStore
from asyncmoe.version_store.writer import ShareSize, ShareWriter, publish

__all__ = [
    "Folder",
    "Geometry",
    "HeldVersion",
    "Retention",
    "ShardReader",
    "ShareSize",
    "ShareWriter",
    "StoreFiles",
    "StoredDelta",
    "StoredObject",
    "VersionId",
    "VersionManifest",
    "VersionStore",
    "divide",
    "open_files",
    "publish",
]
