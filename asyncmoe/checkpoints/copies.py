"""Copies of checkpoints in a second place, which fsspec names by a URL: `URL/NAME OF THE RUN'S DIRECTORY/step-00000012/`.

Object stores cannot rename. The manifest is therefore written last and deleted first: a copy with its manifest is complete, and any other
is absent. All bytes are digested while they are sent and while they are brought back.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from asyncmoe import installed, storage
from asyncmoe.checkpoints import directories, intact, manifest
from asyncmoe.checkpoints.manifest import MANIFEST, Manifest, Sealed
from asyncmoe.errors import AsyncmoeError, DataError, UserError

KEY = "trainer.checkpoint_copy"
_PIECE_BYTES = 8 << 20
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "r2"))
"""fsspec's names of stores without folders."""


@dataclass(frozen=True)
class SecondPlace:
    """The copies of one run.

    Attributes:
        files: fsspec's file system.
        root: path of the run's folder in it.
        shown: its URL without credentials, for messages.
    """

    files: Any
    root: str
    shown: str

    def folder(self, step: int) -> str:
        """Return the path of the copy of a step."""
        return f"{self.root}/{directories.name_of(step)}"


def place_of(url: str, run_dir: Path) -> SecondPlace:
    """Open a second place; no connection is made.

    Raises:
        UserError: fsspec, or its package for this kind of URL, is not installed, or it knows no such kind.
    """
    installed.need("fsspec", KEY)
    import fsspec

    shown, name = without_credentials(url), run_dir.resolve().name
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, TypeError) as error:  # TypeError: a part of the URL is missing
        got = f"{shown}: {' '.join(str(error).split())[:200]}"
        hint = "s3:// needs pip install s3fs, gs:// gcsfs, abfs:// adlfs; file:// needs nothing"
        raise UserError(KEY, got=got, expected="a URL that fsspec can open", hint=hint) from error
    return SecondPlace(files, f"{root.rstrip('/')}/{name}", f"{shown.rstrip('/')}/{name}")


def without_credentials(url: str) -> str:
    """Return a URL without the user and password that it may hold."""
    return re.sub(r"://[^/@]*@", "://", url)


def said(error: BaseException) -> str:
    """Return an error of any package in one line, without credentials."""
    return without_credentials(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def complete(place: SecondPlace) -> list[int]:
    """Return the steps whose copies are complete, ascending. Raises what the file system raises."""
    place.files.invalidate_cache()
    if not place.files.exists(place.root):
        return []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in place.files.ls(place.root, detail=False))
    steps = sorted(step for name in names if (step := directories.step_of(name)) is not None)
    return [step for step in steps if place.files.exists(f"{place.folder(step)}/{MANIFEST}")]


def send(checkpoint: Path, place: SecondPlace, sent: dict[str, Sealed]) -> None:
    """Copy a checkpoint.

    Args:
        sent: files that an earlier attempt has sent; this one adds its own.

    Raises:
        DataError: the checkpoint is damaged, or of before manifests; its copy is then incomplete.
        Exception: what the file system raises.
    """
    listed = intact.listing(checkpoint)
    step = directories.step_of(checkpoint.name)
    if listed is None or step is None:
        raise DataError(str(checkpoint), got="a checkpoint without a manifest", expected="one that can be verified")
    folder = place.folder(step)
    _remove(place, f"{folder}/{MANIFEST}")
    for name, sealed in sorted(listed.items()):
        if sent.get(name) != sealed:
            _send_file(checkpoint / name, place, f"{folder}/{name}", sealed)
            sent[name] = sealed
    place.files.invalidate_cache()
    for name, sealed in listed.items():
        if (size := place.files.info(f"{folder}/{name}")["size"]) != sealed.nbytes:
            sent.pop(name)
            raise DataError(f"{place.shown}/{checkpoint.name}/{name}", got=f"{size} bytes", expected=sealed.nbytes)
    with place.files.open(f"{folder}/{MANIFEST}", "wb") as file:
        file.write(manifest.text_of(listed))


def prune(place: SecondPlace, keep: int, keep_every: int) -> None:
    """Delete copies that a run of these settings would not keep. Raises what the file system raises."""
    steps = complete(place)
    for step in set(steps) - directories.kept(steps, keep, keep_every):
        _remove(place, f"{place.folder(step)}/{MANIFEST}")
        place.files.rm(place.folder(step), recursive=True)


def restore(url: str, run_dir: Path, step: int | None = None) -> Path:
    """Bring a copy back as a checkpoint of the run, and return its directory. The caller holds the run's lock.

    Args:
        step: None: the newest that is complete there.

    Raises:
        DataError: there is no such copy, it is damaged, or the run has this checkpoint, undamaged.
        UserError: see `place_of`.
        StorageError: it cannot be written.
        AsyncmoeError: the second place fails.
    """
    place = place_of(url, run_dir)
    steps = _asked(place, lambda: complete(place))
    if not steps or (step is not None and step not in steps):
        told = f"copies of {', '.join(map(str, steps))}" if steps else "no complete copy"
        raise DataError(place.shown, got=told, expected="a copy of a checkpoint" if step is None else f"one of step {step}")
    step = steps[-1] if step is None else step
    final, written = directories.directory(run_dir, step), directories.temporary(run_dir, step)
    listed = _asked(place, lambda: _manifest(place, step))
    if final.exists():
        if intact.fault(final) is None:
            raise DataError(str(final), got="a checkpoint without damage", expected="none, or a damaged one, to bring back in its place")
        directories.set_aside(final)
    with storage.writing(f"checkpoint of step {step}", written):
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        for name, sealed in sorted(listed.items()):
            _fetch_file(place, f"{place.folder(step)}/{name}", written / name, sealed)
        directories.publish(written, final, listed)
    return final


def _asked(place: SecondPlace, act: Callable[[], Any]) -> Any:
    """Call the second place; its errors are of every package's own kinds.

    Raises:
        AsyncmoeError: it fails.
    """
    try:
        return act()
    except AsyncmoeError:
        raise
    except Exception as error:
        raise AsyncmoeError(f"{place.shown}: {said(error)}") from error


def _manifest(place: SecondPlace, step: int) -> Manifest:
    path = f"{place.folder(step)}/{MANIFEST}"
    if (size := int(place.files.info(path)["size"])) > manifest.MOST_BYTES:
        raise DataError(path, got=f"{size} bytes", expected="the manifest of a checkpoint")
    return manifest.parse(place.files.cat_file(path), Path(path))


def _send_file(source: Path, place: SecondPlace, target: str, sealed: Sealed) -> None:
    _make_folder(place, target)
    with source.open("rb", buffering=0) as read, place.files.open(target, "wb") as write:
        _compare(source, _piped(read.read, write, sealed.nbytes), sealed)


def _make_folder(place: SecondPlace, target: str) -> None:
    """Make the folder of a file where there are folders; in a bucket it would only make a bucket of a mistyped name."""
    kinds = (place.files.protocol,) if isinstance(place.files.protocol, str) else place.files.protocol
    folder = target.rpartition("/")[0]
    if "file" in kinds:
        storage.make_private(Path(folder))
    elif not _BUCKETS.intersection(kinds):
        place.files.makedirs(folder, exist_ok=True)


def try_to_write(place: SecondPlace) -> None:
    """Write a small file and delete it. Raises what the file system raises."""
    path = f"{place.root}/.asyncmoe"
    _make_folder(place, path)
    with place.files.open(path, "wb") as file:
        file.write(b"asyncmoe tried to write here\n")
    place.files.rm_file(path)


def _fetch_file(place: SecondPlace, source: str, target: Path, sealed: Sealed) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as write:
        with _asked(place, lambda: place.files.open(source, "rb")) as read:
            found = _piped(lambda size: bytes(_asked(place, lambda: read.read(size))), write, sealed.nbytes)
        write.flush()
        os.fsync(write.fileno())
    _compare(Path(source), found, sealed)


def _piped(read: Callable[[int], bytes], write: BinaryIO, most_bytes: int) -> Sealed:
    """Copy at most one byte more than there should be, and return size and digest."""
    from asyncmoe.trajectory.native import crc32c

    total = digest = 0
    while piece := read(min(_PIECE_BYTES, most_bytes + 1 - total)):
        digest = crc32c(piece, digest)
        total += len(piece)
        write.write(piece)
    return Sealed(total, digest)


def _compare(path: Path, found: Sealed, sealed: Sealed) -> None:
    if found != sealed:
        got = f"{found.nbytes} bytes of CRC-32C {found.crc32c:08x}"
        raise DataError(str(path), got=got, expected=f"{sealed.nbytes} bytes of {sealed.crc32c:08x}, as its manifest says")


def _remove(place: SecondPlace, path: str) -> None:
    place.files.invalidate_cache()
    if place.files.exists(path):
        place.files.rm_file(path)
