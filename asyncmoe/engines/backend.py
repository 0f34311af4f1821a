"""The implementation of `asyncmoe.engines.engine` that runs use: SGLang. No other module imports it."""

from __future__ import annotations

from asyncmoe.engines.engine import Engine
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.process import SGLangProcess

start = SGLangProcess
"""Starts an engine on this machine, or one node of it; an `asyncmoe.engines.engine.EngineProcess`."""


def connect(name: str, url: str, key: str) -> Engine:
    """Return the client of an engine that runs on another machine. `name`, `url` and `key` are those of its process there."""
    return SGLangClient(name, url, key)
