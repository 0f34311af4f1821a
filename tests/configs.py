"""Configurations of which a test needs few keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe.config import Config, load, parse

DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"


def minimal(run_dir: Path | str = "run", model: Path | str | dict[str, Any] = "model", steps: int = 1, **sections: Any) -> Config:
    """The configuration of a run that learns arithmetic, with these sections besides."""
    models = model if isinstance(model, dict) else {"path": str(model)}
    required = {"run": {"dir": str(run_dir), "steps": steps}, "model": models, "task": {"kind": "arithmetic"}}
    return parse({**required, **sections})


def demo(*settings: str) -> Config:
    """The demo's configuration with these settings instead of its own."""
    return load(DEMO, settings)
