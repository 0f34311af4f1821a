"""Versions of the software that computes a run, recorded at each start in run.dir/versions.jsonl."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncmoe import installed
from asyncmoe.telemetry.records import JsonLines, Tail

VERSIONS = "versions.jsonl"
_PACKAGES = ("asyncmoe", "torch", "megatron-core", "transformer-engine", "transformers", "sglang", "numpy")
_GIT_S = 5.0


def record(run_dir: Path, engine_python: Path | str | None) -> None:
    """Append the versions of this start of a run. Raises StorageError if they cannot be written."""
    with JsonLines(run_dir / VERSIONS) as lines:
        lines.write({"time": time.time(), "versions": versions(engine_python)})


def read(run_dir: Path) -> Mapping[str, str]:
    """Return the versions of the newest start of a run; {} for a run begun by an older asyncmoe.

    Raises:
        DataError: a line is damaged.
    """
    starts = Tail(run_dir / VERSIONS).poll_as(dict[str, Any])
    return starts[-1]["versions"] if starts else {}


def versions(engine_python: Path | str | None) -> dict[str, str]:
    """Return the versions of Python, of computing packages (from this environment, else the engines'), and of the checkout."""
    found = {"python": platform.python_version()}
    folders = [] if engine_python is None else Path(engine_python).parent.parent.glob("lib/python*/site-packages")
    places = [str(folder) for folder in folders]
    found |= packages(_PACKAGES, places) | packages(_PACKAGES)
    commit = _commit()
    return found if commit is None else found | {"commit": commit}


def packages(names: Iterable[str], path: list[str] = sys.path) -> dict[str, str]:
    """Return the versions of those packages that are installed in the folders of `path`."""
    return {name: one.version for name in names for one in [*metadata.distributions(name=name, path=path)][:1]}


def _commit() -> str | None:
    """Return the commit of this checkout, with "-dirty" if tracked files differ from it; None without a checkout or without git."""
    if not installed.from_checkout():
        return None
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parents[2]), *describe], capture_output=True, text=True, timeout=_GIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
