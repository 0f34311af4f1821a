"""The one adapter that a run's engines serve: installed when they start; the receivers write its weights in place."""

from __future__ import annotations

from asyncmoe.config import Config

NAME = "policy"
SLOTS = 2
"""Adapter slots of an engine: requests without an adapter occupy one too."""


def asked(config: Config) -> str | None:
    """Return the name of the adapter to sample requests with, if any."""
    return None if config.adapter is None else NAME
