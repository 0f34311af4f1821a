"""Check the requirements of loggers before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from asyncmoe import installed
from asyncmoe.config.telemetry import TelemetrySection
from asyncmoe.errors import ConfigError, Faults

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
"""Keys of `telemetry`, names of the packages, and names of our extras."""


def configured(section: TelemetrySection) -> list[str]:
    """Return the names of the configured loggers."""
    off = None if section.tensorboard == "on" or installed.has("tensorboard") else "auto"
    return [name for name in NAMES if getattr(section, name) not in (None, "off", off)]


def check(section: TelemetrySection) -> None:
    """Refuse a logger whose package or credentials are missing.

    Raises:
        ConfigError: names each logger and what to install or set.
    """
    faults = Faults()
    for name in configured(section):
        if not installed.has(name):
            hint = f"run: {installed.fix(name)}"
            faults.add(ConfigError(f"telemetry.{name}", got=f"no package {name}", expected="the package in this environment", hint=hint))
    if section.wandb is not None and os.environ.get("WANDB_MODE", "online") == "online" and not _wandb_key():
        hint = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        faults.add(ConfigError("telemetry.wandb", got="no API key of Weights & Biases", expected="a key where W&B looks for it", hint=hint))
    if section.mlflow is not None and not os.environ.get("MLFLOW_TRACKING_URI"):
        hint = "set the variable to http://HOST:PORT"
        faults.add(ConfigError("telemetry.mlflow", got="no MLFLOW_TRACKING_URI", expected="the tracking server's address", hint=hint))
    faults.refuse()


def _wandb_key() -> bool:
    """Return whether there may be a key where W&B looks: its variables, or the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    return any(Path(os.path.expanduser(path)).is_file() for path in ([named] if named else ["~/.netrc", "~/_netrc"]))
