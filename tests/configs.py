"""Configurations of which a test needs few keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe.config import Config, parse


def minimal(run_dir: Path | str = "run", model: Path | str = "model", steps: int = 1, **sections: Any) -> Config:
    """The configuration of a run that learns arithmetic, with these sections besides."""
    required = {"run": {"dir": str(run_dir), "steps": steps}, "model": {"path": str(model)}, "task": {"kind": "arithmetic"}}
    return parse({**required, **sections})
