"""Configurations of which a test needs few keys."""

from __future__ import annotations

import json
import shutil
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


def without_template(model: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a model without its chat template, and with these settings of its tokenizer instead."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("chat_template*"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"} | settings))
    return folder
