"""Configuration and versions of a run, which a logger shows beside it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncmoe.config import Config

_PACKAGES = ("asyncmoe", "torch", "megatron-core", "transformer-engine", "transformers", "sglang")


def parameters(config: Config) -> dict[str, Any]:
    """Return every key of the configuration, nested, and `versions`. The configuration holds no keys of loggers (`config.telemetry`)."""
    return {**config.model_dump(mode="json"), "versions": versions(config.engines.python)}


def versions(engine_python: Path | str | None) -> dict[str, str]:
    """Return the versions of Python and of the packages that compute: of this environment, else of the engines'."""
    found = {"python": platform.python_version()}
    if engine_python is not None:
        folders = Path(engine_python).parent.parent.glob("lib/python*/site-packages")
        found |= _installed(metadata.distributions(path=[str(folder) for folder in folders]))
    return found | _installed(metadata.distributions())


def _installed(distributions: Iterable[metadata.Distribution]) -> dict[str, str]:
    return {one.metadata["Name"]: one.version for one in distributions if one.metadata["Name"] in _PACKAGES}
