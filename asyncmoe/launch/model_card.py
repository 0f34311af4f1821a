"""The model card of an export: what it was trained from, on what, and how to load it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.models.hub import is_id

_CACHED = re.compile(r"models--(.+?)--(.+?)/snapshots/")
"""A model's directory in the hub's cache (huggingface_hub, "Manage your cache")."""


def card(config: Config, facts: Mapping[str, Any], name: str, *, adapter: bool) -> str:
    """Return README.md for the hub, without paths of this machine.

    Args:
        facts: facts of the checkpoint.
        name: name of the exported directory.
        adapter: only the adapter is exported.
    """
    base, task, lora = _shown(config.model.path), config.task, config.adapter
    library, auto = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    return (
        (files("asyncmoe.launch") / "model_card.md")
        .read_text(encoding="utf-8")
        .format(
            **{"config": config, "facts": facts, "name": name, "base": base, "library": library, "auto": auto},
            hub=f"base_model: {base}\n" if "/" in base else "",
            what="The weights of" if lora is None else f"An adapter of rank {lora.rank} {'for' if adapter else 'merged into'}",
            version=metadata.version("asyncmoe"),
            date=f"{datetime.fromtimestamp(facts['time'], UTC):%Y-%m-%d}" if "time" in facts else "an unknown day",
            task=", ".join([task.kind, *(_shown(one.path) for one in task.mixture if one.path is not None)]),
        )
    )


def _shown(path: Path) -> str:
    """Return an id of the hub, or the last part of a path."""
    cached = _CACHED.search(str(path))
    return "/".join(cached.groups()) if cached else str(path) if is_id(path) else path.name
