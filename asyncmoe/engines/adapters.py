"""Which adapters the engines of a run serve.

Either the receivers write an adapter's memory in the engines (`asyncmoe.weights.receiver`): then there is one adapter, `NAME`, installed at
the start. Or every version is an adapter of its own that the engine loads (`asyncmoe.engines.adapter_slots`).
"""

from __future__ import annotations

from typing import TypedDict

from asyncmoe.config import Config

NAME = "policy"
"""The adapter of an engine whose adapter memory the receivers write."""
SLOTS = 2
"""Number of adapters that an engine holds at a time."""
BASE = "0"
"""An engine's version string for the checkpoint's weights."""


def in_memory(config: Config) -> bool:
    """Return True if adapters are trained and the receivers write them."""
    return config.adapter is not None and config.sync.method == "reshard"


class AdapterChoice(TypedDict):
    """The adapter arguments of `asyncmoe.engines.pool.Pool`."""

    adapter: str | None
    slots: bool


def asked(config: Config) -> AdapterChoice:
    """Return the adapter arguments of the pool for a configuration."""
    return {"adapter": NAME if in_memory(config) else None, "slots": config.adapter is not None and not in_memory(config)}
