"""One part of a run in this process: the controller, an engine, or a rollout worker."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncmoe import installed, surroundings
from asyncmoe.errors import AsyncmoeError, Interrupted, UserError
from asyncmoe.imports import uncollected
from asyncmoe.process import leave, say
from asyncmoe.telemetry import heartbeats, processes

if TYPE_CHECKING:
    from asyncmoe.config import Config


def controller(config: Path, overrides: Sequence[str] = ()) -> None:
    """Run the controller to the end of the run.

    Raises:
        AsyncmoeError: see `asyncmoe.rollout.controller.run`.
    """
    with uncollected():
        from asyncmoe.config import moved
        from asyncmoe.launch import local
        from asyncmoe.rollout import controller

    loaded = _loaded(config, overrides)
    if config.resolve() != (loaded.run.dir / moved.FILE).resolve():  # else the parent process has prepared it
        local.prepare(loaded)
    with _heard(loaded, "controller"):
        controller.run(loaded, loaded.run.dir)


def engine(config: Path, overrides: Sequence[str] = (), name: str | None = None, index: int = 0, node: int = 0) -> None:
    """Run one engine that joins a run, or one node of it, until it leaves.

    Args:
        name: the engine's name in records and messages; None: built from the host, the SLURM job and `index`.
        index: number of this engine on its machine, from 0.
        node: index of this machine among the engine's `engines.nodes` machines, which need the same `name`.

    Raises:
        UserError: the engine has no such node, or has several nodes but no name.
        AsyncmoeError: see `asyncmoe.engines.engine_agent.run`.
    """
    with uncollected():
        from asyncmoe import models
        from asyncmoe.doctor.pythons import check_engine_python
        from asyncmoe.engines import engine_agent
        from asyncmoe.engines.nodes import process_name
        from asyncmoe.launch import gpus

    loaded = _loaded(config, overrides)
    engine_agent.check_node(loaded.engines.nodes, name, node)
    check_engine_python(loaded.engines.python)
    models.check(loaded, models.hf_config_of(loaded), weights=loaded.model.path)
    name = name or engine_agent.default_name(index)
    with _heard(loaded, process_name(name, node)):
        engine_agent.run(loaded, name, index, gpus.engine_arguments(loaded, index), node)


def worker(config: Path, overrides: Sequence[str], number: int) -> None:
    """Run a rollout worker until the run ends.

    Args:
        number: its number among the run's `rollout.workers`, from 1.

    Raises:
        AsyncmoeError: see `asyncmoe.rollout.workers.process.run`.
    """
    with uncollected():
        from asyncmoe.rollout.workers import process

    loaded = _loaded(config, overrides)
    process.check_number(loaded, number)
    with _heard(loaded, process.process_name(number)):
        process.run(loaded, loaded.run.dir, number)


def _loaded(config: Path, overrides: Sequence[str]) -> Config:
    """Return a configuration whose model is on this machine."""
    with uncollected():
        from asyncmoe import config as configuration
        from asyncmoe.models.hub import with_local_model

    return with_local_model(configuration.load(config, overrides))


@contextmanager
def _heard(config: Config, role: str) -> Iterator[None]:
    """Record this process and start its heartbeats; report its end if the block succeeds."""
    processes.record(config.run.dir, role)
    heartbeats.start(config.run.dir, role, config.watch.beat_s)
    yield
    heartbeats.beat(heartbeats.ENDED)


def main(run: Callable[[], object]) -> None:
    """Run a command. An error that the user can fix becomes one line and the exit status; all other errors keep their traceback."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    # An agent's client logs every request, and there are hundreds a step; torch logs its caches at the end, after a command's last line.
    for name in ("httpx", "httpx2", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.path.insert(0, "")  # as `python -m` does, so that the user's scorers and environments are importable
    refused: AsyncmoeError | None
    try:
        surroundings.settle()
        run()
        return
    except AsyncmoeError as error:
        refused = error
    except KeyboardInterrupt:
        refused = Interrupted("interrupted")
    except PermissionError as error:
        refused = UserError(str(error.filename), got=error.strerror, expected="a file or folder that this user may use")
    except Exception as error:  # noqa: BLE001  not swallowed: the error is printed and ends the process
        refused = installed.explained(error) if isinstance(error, ModuleNotFoundError) else None
        if refused is None:
            traceback.print_exc()
            leave(1)
    say(refused)
    leave(refused.exit_code)


def end() -> None:
    """Exit at once with status 0 if users' code has left threads that Python would wait for."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        leave(0)
