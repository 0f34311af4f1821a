"""Configuration of a run as the page shows it: one line for each key, without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncmoe.telemetry.loggers.points import flat
from asyncmoe.telemetry.samples.visible import visible

CONFIG = "config.yaml"
HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|[._-])(?:\w*key|token|secret|password|passwd|credentials?|authorization|cookie)$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@]*@")
_MOST_TEXT = 2000


def settings(run_dir: Path) -> dict[str, str]:
    """Return the resolved configuration, by path of the key ("rollout.group_size"); {} if the run has no config.yaml that can be read.

    No key of asyncmoe's own holds a secret, but the options of a user's parts, and addresses, may: a text under a key such as `api_key`,
    and the user of an address, are hidden.
    """
    try:
        values = yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return {}
    return {visible(path): visible(_shown(path, value)) for path, value in flat(values).items()} if isinstance(values, Mapping) else {}


def _shown(path: str, value: Any) -> str:
    if isinstance(value, str) and value and _SECRET.search(path):
        return HIDDEN
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return _USER.sub(f"{HIDDEN}@", text)[:_MOST_TEXT]
