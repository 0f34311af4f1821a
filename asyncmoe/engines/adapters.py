"""The adapter that the engines of a run serve: one, installed at their start, whose memory the receivers write."""

from __future__ import annotations

from typing import TypedDict

from asyncmoe.config import Config

NAME = "policy"
SLOTS = 2
"""Adapters that an engine holds at a time: requests without one occupy a slot too."""


class AdapterChoice(TypedDict):
    """The adapter argument of `asyncmoe.engines.pool.Pool`."""

    adapter: str | None


def asked(config: Config) -> AdapterChoice:
    """Return the adapter argument of the pool for a configuration."""
    return {"adapter": None if config.adapter is None else NAME}
