"""Reads back what a page of a run holds, without a browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def packed(page: str, name: str) -> bytes:
    """What the page holds under a name."""
    (found,) = re.findall(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    return gzip.decompress(base64.b64decode(found))


def data_of(path: Path) -> list[dict[str, Any]]:
    """The runs of a page."""
    found: list[dict[str, Any]] = json.loads(packed(path.read_text(), "data"))
    return found


def group_of(path: Path, run: int, place: int) -> dict[str, Any]:
    """A group of a page."""
    found: dict[str, Any] = json.loads(packed(path.read_text(), f"group-{run}-{place}"))
    return found


def figures_of(run: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> title -> figure."""
    return {part["title"]: {one["title"]: one for one in part["figures"]} for part in [*run["sections"], run["rest"]]}
