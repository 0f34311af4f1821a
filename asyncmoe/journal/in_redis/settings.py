"""What a server must promise, for the journal: what it acknowledges is on its disk and stays there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import UserError

KEY = "journal.redis"
LEAST = (6, 2)
"""XTRIM MINID and CLIENT LIST ID came with it."""


@dataclass(frozen=True)
class ServerUse:
    """What a server is used for.

    Attributes:
        what: in messages: "journal".
        key: of the configuration, which names the server.
        without: what happens if the key is null.
        needs: values of a setting, the expected one first, and why it is needed.
        cure: of a full server.
        then: what to do once the cause is removed.
        guide: has the list of what its user must be allowed to do.
    """

    what: str
    key: str
    without: str
    needs: Mapping[str, tuple[tuple[str, ...], str]]
    cure: str
    then: str
    guide: str


JOURNAL = ServerUse(
    "journal",
    KEY,
    "null keeps the journal in a folder",
    {
        "appendonly": (("yes",), "without it a server that ends has nothing on its disk"),
        "appendfsync": (("always",), "otherwise the server acknowledges what is not on its disk"),
        "no-appendfsync-on-rewrite": (("no",), "otherwise the server does not sync while it writes its file anew"),
        "maxmemory-policy": (("noeviction",), "otherwise a full server deletes what no checkpoint has"),
    },
    "raise its maxmemory, or save checkpoints more often (trainer.checkpoint_every), which frees what they cover",
    "start the run again: what was acknowledged is not lost",
    "docs/guides/journal.md",
)


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


def read(client: Any, use: ServerUse = JOURNAL) -> Settings:
    """Ask a server. Raises the client library's errors."""
    info = client.info("server") | client.info("replication")
    asked = {name: client.config_get(name).get(name, "") for name in use.needs}
    return Settings(str(info.get("redis_version", "")), str(info.get("redis_mode", "")), str(info.get("role", "")), asked)


def check(found: Settings, name: str, use: ServerUse = JOURNAL) -> None:
    """Refuse a server that cannot be used.

    Args:
        name: of the server, for messages.

    Raises:
        UserError: names the setting.
    """
    version = tuple(int(part) for part in found.version.split(".")[:2] if part.isdecimal())
    if version < LEAST:
        raise UserError(
            use.key, got=f"Redis {found.version or 'of no known version'} at {name}", expected=f"{LEAST[0]}.{LEAST[1]} or later"
        )
    if found.mode != "standalone":
        hint = "name a server of its own"
        raise UserError(use.key, got=f"{name}, a Redis in mode {found.mode or 'unknown'}", expected="a single server", hint=hint)
    if found.role != "master":
        raise UserError(use.key, got=f"{name}, a replica", expected="a server that can be written", hint="name its master")
    check_config(found, name, use)


def check_config(found: Settings, name: str, use: ServerUse = JOURNAL) -> None:
    """Refuse a server on which acknowledged entries could be lost. Arguments and errors as for `check`."""
    for setting, (expected, why) in use.needs.items():
        if (got := found.config.get(setting, "")) not in expected:
            hint = f"{why}: set it in the server's redis.conf"
            raise UserError(f"{use.key}: {setting} of {name}", got=got or "nothing", expected=" or ".join(expected), hint=hint)
