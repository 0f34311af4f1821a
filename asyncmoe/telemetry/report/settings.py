"""Configuration of a run as the page shows it: one line for each key, without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
import yaml

from asyncmoe.telemetry.samples.visible import visible

CONFIG = "config.yaml"
HIDDEN = "(hidden)"
_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:api_?key|access_?key|key|token|secret|password|passwd|credentials?|authorization|cookie)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"^(?:bearer|basic)\s|^(?:sk|hf|ghp|xox[a-z])[-_]\w{8}", re.IGNORECASE)
_MOST_TEXT = 2000


def settings(run_dir: Path) -> dict[str, str]:
    """Return the resolved configuration, by path of the key ("rollout.group_size"); {} if the run has no config.yaml that can be read.

    No key of asyncmoe's own holds a secret, but the options of a user's parts, and addresses, may: a text under a key such as `api_key`,
    a text that looks like a token, and the password and query of an address are hidden.
    `asyncmoe.telemetry.run.broken_configuration` says what is wrong with the file.
    """
    try:
        values = yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return {}
    return dict(_flat(values, "")) if isinstance(values, Mapping) else {}


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping | list) for one in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{number}]")
    else:
        yield visible(path), visible(_shown(path, value))


def _shown(path: str, value: Any) -> str:
    last = re.split(r"[.\[]", path.rstrip("]0123456789["))[-1]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(path, one) for one in value)}]"[:_MOST_TEXT]
    if not isinstance(value, str):
        return msgspec.json.encode(value, enc_hook=str).decode()
    if value and (_SECRET_KEY.search(last) or _SECRET_VALUE.search(value)):
        return HIDDEN
    return _without_secret(value)[:_MOST_TEXT]


def _without_secret(text: str) -> str:
    """Hide user, password and query of an address."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return HIDDEN
    place = parts.netloc.rpartition("@")
    netloc = f"{HIDDEN}@{place[2]}" if place[1] else parts.netloc
    return urlunsplit(parts._replace(netloc=netloc, query=HIDDEN if parts.query else ""))
