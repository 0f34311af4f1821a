"""Configuration and versions of a run, which a logger shows beside it."""

from __future__ import annotations

from typing import Any

from asyncmoe.config import Config
from asyncmoe.telemetry.versions import versions


def parameters(config: Config) -> dict[str, Any]:
    """Return every key of the configuration, nested, and `versions`. The configuration holds no keys of loggers (`config.telemetry`)."""
    return {**config.model_dump(mode="json"), "versions": versions(config.engines.python)}
