"""Which sources there are, and which an extension was built from. setup.py runs this file by itself, so it imports nothing of asyncmoe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

FOLDERS = ("csrc", "csrc/record")
"""Those of asyncmoe.reshard._C and asyncmoe.record._C, relative to the checkout."""
_SUFFIXES = {".h", ".cpp", ".cu"}


def digest(folder: Path) -> str:
    """SHA-256 in hex over names and contents of the sources right in a folder."""
    return _digest(folder, (path for path in folder.iterdir() if path.suffix in _SUFFIXES))


def code(package: Path) -> str:
    """The same over all Python files of a package."""
    return _digest(package, package.rglob("*.py"))


def present(checkout: Path) -> tuple[str, ...]:
    """The digests of a checkout, by folder; empty where there are no sources, as in an installed wheel."""
    folders = [checkout / folder for folder in FOLDERS]
    return tuple(digest(folder) for folder in folders) if all(folder.is_dir() for folder in folders) else ()


def _digest(folder: Path, files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        found.update(f"{file.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()
