"""Digests of the extensions' sources. setup.py runs this file on its own, so it imports nothing from asyncmoe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

FOLDERS = ("csrc", "csrc/record")
"""Source directories of asyncmoe.reshard._C and asyncmoe.trajectory._C, relative to the checkout."""
_SUFFIXES = {".h", ".cpp", ".cu"}


def digest(folder: Path) -> str:
    """Return the SHA-256 in hex over names and contents of the sources in a folder, excluding subfolders."""
    return _digest(folder, (path for path in folder.iterdir() if path.suffix in _SUFFIXES))


def code(package: Path) -> str:
    """Return the SHA-256 in hex over names and contents of all Python files of a package."""
    return _digest(package, package.rglob("*.py"))


def present(checkout: Path) -> tuple[str, ...]:
    """Return the digests of a checkout's `FOLDERS`; empty without sources, as in an installed wheel."""
    folders = [checkout / folder for folder in FOLDERS]
    return tuple(digest(folder) for folder in folders) if all(folder.is_dir() for folder in folders) else ()


def _digest(folder: Path, files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        found.update(f"{file.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()
