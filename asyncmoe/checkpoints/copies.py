"""Copies of checkpoints in a second place, an fsspec URL: `URL/NAME OF THE RUN'S DIRECTORY/step-00000012/`.

Object stores cannot rename. The manifest is therefore written last and deleted first: a copy with its manifest is complete, and a copy
without one counts as absent. Files are digested before sending and after restoring.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncmoe import installed, storage
from asyncmoe.checkpoints import directories, intact, manifest
from asyncmoe.checkpoints.manifest import MANIFEST, Manifest
from asyncmoe.checkpoints.retention import Retention
from asyncmoe.errors import AsyncmoeError, DataError, UserError

KEY = "trainer.checkpoint_copy"
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "r2"))
"""fsspec's protocol names of stores without folders."""


@dataclass(frozen=True)
class SecondPlace:
    """The copies of one run.

    Attributes:
        files: fsspec's file system.
        root: path of the run's folder in it.
        shown: the folder's URL without credentials, for messages.
    """

    files: Any
    root: str
    shown: str

    def folder(self, step: int) -> str:
        """Return the path of the copy of a step."""
        return f"{self.root}/{directories.name_of(step)}"


def place_of(url: str, run_dir: Path) -> SecondPlace:
    """Open a second place, without connecting.

    Raises:
        UserError: fsspec, or its package for this kind of URL, is not installed, or the kind is unknown.
    """
    installed.need("fsspec", KEY)
    import fsspec

    shown, name = without_credentials(url), run_dir.resolve().name
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, TypeError) as error:  # TypeError: a part of the URL is missing
        got = f"{shown}: {' '.join(str(error).split())[:200]}"
        hint = "s3:// needs the package s3fs, gs:// gcsfs, abfs:// adlfs; file:// needs none"
        raise UserError(KEY, got=got, expected="a URL that fsspec can open", hint=hint) from error
    return SecondPlace(files, f"{root.rstrip('/')}/{name}", f"{shown.rstrip('/')}/{name}")


def without_credentials(url: str) -> str:
    """Return a URL without user and password."""
    return re.sub(r"://[^/@]*@", "://", url)


def said(error: BaseException) -> str:
    """Format any package's error as one line, without credentials."""
    return without_credentials(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def complete(place: SecondPlace) -> list[int]:
    """Return the steps whose copies are complete, ascending. Raises the file system's errors."""
    place.files.invalidate_cache()
    if not place.files.exists(place.root):
        return []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in place.files.ls(place.root, detail=False))
    steps = sorted(step for name in names if (step := directories.step_of(name)) is not None)
    return [step for step in steps if place.files.exists(f"{place.folder(step)}/{MANIFEST}")]


def send(checkpoint: Path, place: SecondPlace) -> None:
    """Copy a checkpoint.

    Raises:
        DataError: the checkpoint is damaged; its copy is then incomplete.
        Exception: the file system's errors.
    """
    listed = manifest.read(checkpoint)
    folder = f"{place.root}/{checkpoint.name}"
    _remove(place, f"{folder}/{MANIFEST}")
    for name, sealed in sorted(listed.items()):
        if (fault := manifest.changed(checkpoint, listed, [name])) is not None:
            raise DataError(str(checkpoint), got=fault, expected="undamaged files")
        _make_folder(place, f"{folder}/{name}")
        place.files.put_file(str(checkpoint / name), f"{folder}/{name}")
        place.files.invalidate_cache()
        if (size := place.files.info(f"{folder}/{name}")["size"]) != sealed.nbytes:
            raise DataError(f"{place.shown}/{checkpoint.name}/{name}", got=f"{size} bytes", expected=f"{sealed.nbytes} bytes")
    with place.files.open(f"{folder}/{MANIFEST}", "wb") as file:
        file.write(manifest.text_of(listed))


def prune(place: SecondPlace, asked: Retention) -> None:
    """Delete copies that are no longer kept. The log is not copied, so no copy is kept for the recorded window. Raises the file system's
    errors."""
    steps = complete(place)
    for step in set(steps) - replace(asked, recorded=None).kept(steps):
        _remove(place, f"{place.folder(step)}/{MANIFEST}")
        place.files.rm(place.folder(step), recursive=True)


def restore(url: str, run_dir: Path, step: int | None = None) -> Path:
    """Restore a copy as a checkpoint of the run, and return its directory. The caller holds the run's lock.

    Args:
        step: the copy's step; None: the step of the newest complete copy.

    Raises:
        DataError: there is no such copy, it is damaged, or the run has an undamaged checkpoint of this step.
        UserError: see `place_of`.
        StorageError: it cannot be written.
        AsyncmoeError: the second place fails.
    """
    place = place_of(url, run_dir)
    steps = _asked(place, lambda: complete(place))
    if not steps or (step is not None and step not in steps):
        told = f"copies of steps {', '.join(map(str, steps))}" if steps else "no complete copy"
        raise DataError(place.shown, got=told, expected="a copy of a checkpoint" if step is None else f"a copy of step {step}")
    step = steps[-1] if step is None else step
    final, written = directories.directory(run_dir, step), directories.temporary(run_dir, step)
    path = f"{place.folder(step)}/{MANIFEST}"
    listed: Manifest = _asked(place, lambda: manifest.parse(place.files.cat_file(path), Path(path)))
    if final.exists():
        if intact.fault(final) is None:
            raise DataError(str(final), got="a checkpoint without damage", expected="no checkpoint there, or a damaged one to replace")
        directories.set_aside(final)
    with storage.writing(f"checkpoint of step {step}", written):
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        for name, sealed in sorted(listed.items()):
            (written / name).parent.mkdir(parents=True, exist_ok=True)
            _asked(place, partial(place.files.get_file, f"{place.folder(step)}/{name}", str(written / name)))
            if (found := manifest.seal(written / name, sync=True)) != sealed:
                got = f"{found.nbytes} bytes with CRC-32C {found.crc32c:08x}"
                expected = f"{sealed.nbytes} bytes with CRC-32C {sealed.crc32c:08x}, as in the manifest"
                raise DataError(f"{place.shown}/{final.name}/{name}", got=got, expected=expected)
        directories.publish(written, final, listed)
    return final


def _asked(place: SecondPlace, act: Callable[[], Any]) -> Any:
    """Call the second place, translating the errors of any package.

    Raises:
        AsyncmoeError: the call fails.
    """
    try:
        return act()
    except AsyncmoeError:
        raise
    except Exception as error:
        raise AsyncmoeError(f"{place.shown}: {said(error)}") from error


def _make_folder(place: SecondPlace, target: str) -> None:
    """Make a file's folder, except in bucket stores, where this could only create a bucket from a mistyped name."""
    kinds = (place.files.protocol,) if isinstance(place.files.protocol, str) else place.files.protocol
    folder = target.rpartition("/")[0]
    if "file" in kinds:
        storage.make_private(Path(folder))
    elif not _BUCKETS.intersection(kinds):
        place.files.makedirs(folder, exist_ok=True)


def try_to_write(place: SecondPlace) -> None:
    """Write a small file and delete it. Raises the file system's errors."""
    path = f"{place.root}/.asyncmoe"
    _make_folder(place, path)
    with place.files.open(path, "wb") as file:
        file.write(b"asyncmoe tried to write here\n")
    place.files.rm_file(path)


def _remove(place: SecondPlace, path: str) -> None:
    place.files.invalidate_cache()
    if place.files.exists(path):
        place.files.rm_file(path)
