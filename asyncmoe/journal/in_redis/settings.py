"""What a server must promise, for the journal: what it acknowledges is on its disk and stays there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import UserError

KEY = "journal.redis"
LEAST = (6, 2)
"""XTRIM MINID and CLIENT LIST ID came with it."""
_NEEDS = {
    "appendonly": ("yes", "without it a server that ends has nothing on its disk"),
    "appendfsync": ("always", "otherwise the server acknowledges what is not on its disk"),
    "no-appendfsync-on-rewrite": ("no", "otherwise the server does not sync while it writes its file anew"),
    "maxmemory-policy": ("noeviction", "otherwise a full server deletes what no checkpoint has"),
}
"""Values of settings, and why they are needed."""


@dataclass(frozen=True)
class Settings:
    """What a server says of itself.

    Attributes:
        version: "7.0.15".
        mode: "standalone", "cluster" or "sentinel".
        role: "master" or "slave".
        config: those of CONFIG GET that matter.
    """

    version: str
    mode: str
    role: str
    config: Mapping[str, str]


def read(client: Any) -> Settings:
    """Ask a server. Raises the client library's errors."""
    info = client.info("server") | client.info("replication")
    asked = {name: client.config_get(name).get(name, "") for name in _NEEDS}
    return Settings(str(info.get("redis_version", "")), str(info.get("redis_mode", "")), str(info.get("role", "")), asked)


def check(found: Settings, name: str) -> None:
    """Refuse a server that cannot be used.

    Args:
        name: of the server, for messages.

    Raises:
        UserError: names the setting.
    """
    version = tuple(int(part) for part in found.version.split(".")[:2] if part.isdecimal())
    if version < LEAST:
        raise UserError(KEY, got=f"Redis {found.version or 'of no known version'} at {name}", expected=f"{LEAST[0]}.{LEAST[1]} or later")
    if found.mode != "standalone":
        hint = "name a server of its own"
        raise UserError(KEY, got=f"{name}, a Redis in mode {found.mode or 'unknown'}", expected="a single server", hint=hint)
    if found.role != "master":
        raise UserError(KEY, got=f"{name}, a replica", expected="a server that can be written", hint="name its master")
    check_config(found, name)


def check_config(found: Settings, name: str) -> None:
    """Refuse a server on which acknowledged entries could be lost. Arguments and errors as for `check`."""
    for setting, (expected, why) in _NEEDS.items():
        if (got := found.config.get(setting, "")) != expected:
            hint = f"{why}: set it in the server's redis.conf"
            raise UserError(f"{KEY}: {setting} of {name}", got=got or "nothing", expected=expected, hint=hint)
