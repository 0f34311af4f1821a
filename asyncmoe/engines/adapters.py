"""The adapter that the engines of a run serve: one, installed at their start, whose memory the receivers write."""

from __future__ import annotations

from asyncmoe.config import Config

NAME = "policy"
SLOTS = 2
"""Adapters that an engine holds at a time: requests without one occupy a slot too."""


def asked(config: Config) -> str | None:
    """Return the name of the adapter that requests are sampled with, if any."""
    return None if config.adapter is None else NAME
