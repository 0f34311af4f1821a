"""Which sources an extension was built from. setup.py runs this file by itself, so it imports nothing of asyncmoe."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDERS = ("csrc", "csrc/record")
"""Those of asyncmoe.reshard._C and asyncmoe.record._C, relative to the checkout."""
_SUFFIXES = {".h", ".cpp", ".cu"}


def digest(folder: Path) -> str:
    """SHA-256 in hex over names and contents of the sources right in a folder."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def present(checkout: Path) -> tuple[str, ...]:
    """The digests of a checkout, by folder; empty where there are no sources, as in an installed wheel."""
    folders = [checkout / folder for folder in FOLDERS]
    return tuple(digest(folder) for folder in folders) if all(folder.is_dir() for folder in folders) else ()
