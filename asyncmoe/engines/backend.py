"""The implementation of `asyncmoe.engines.engine` that runs use: SGLang. No other module imports it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncmoe.config import Config
from asyncmoe.engines.engine import Engine, EngineProcess
from asyncmoe.engines.nodes import NodePlace
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.errors import InvariantBroken
from asyncmoe.rpc.address import LOOPBACK


def start(
    name: str,
    config: Config,
    index: int,
    run_dir: Path,
    *,
    host: str = LOOPBACK,
    key: str | None = None,
    seed: int | None = None,
    memory: Sequence[str] = (),
    place: NodePlace | None = None,
) -> EngineProcess:
    """Start an engine on this machine, or one node of it.

    Call it from the main thread, because Linux ends the server when the thread that started it ends.

    Args:
        name: name of the engine in records and messages.
        index: index of this engine on its machine.
        host: address to listen on.
        key: key that every request needs; default: a random one, which only this process knows.
        seed: added to the run's seed, so that no two engines draw the same samples; default: `index`.
        memory: arguments that limit its GPU memory (`asyncmoe.plan.budget.engine_arguments`).
        place: the node to start, of an engine over several; None: the whole engine.

    Raises:
        UserError: the port is taken.
    """
    return SGLangProcess(name, config, index, run_dir, host=host, key=key, seed=seed, memory=memory, place=place)


def connect(name: str, url: str, key: str) -> Engine:
    """Return the client of an engine that another machine has started; the arguments are those of its process."""
    return SGLangClient(name, url, key)


def address_of(engine: Engine) -> tuple[str, str]:
    """Return URL and key of an engine, with which another process can `connect`."""
    if not isinstance(engine, SGLangClient):
        raise InvariantBroken(f"got a client of type {type(engine).__name__}, expected one that `connect` made")
    return engine.url, engine.key
