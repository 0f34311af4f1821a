"""Gather the facts of this machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncmoe
from asyncmoe import build
from asyncmoe.config import Config
from asyncmoe.doctor import nvidia, pythons
from asyncmoe.doctor.facts import Machine, PythonFacts
from asyncmoe.doctor.planned import planned
from asyncmoe.engines.engine_python import engine_python
from asyncmoe.errors import UserError


def gather(config: Config | None, with_model: bool = True) -> Machine:
    """Return the facts of this machine, and of the configuration if there is one. Every program that is asked has a time limit."""
    package = Path(asyncmoe.__file__).resolve().parent
    declared = pythons.declared(package.parent)
    with ThreadPoolExecutor() as pool:
        trainer = pool.submit(pythons.look, sys.executable, tuple(declared.specifiers))
        engine = pool.submit(_engine, config, tuple(declared.specifiers))
        gpus = pool.submit(nvidia.look)
        return Machine(
            host=socket.gethostname(),
            asyncmoe=f"{declared.version} ({build.package_digest(package)[:12]})",
            requirements=declared.specifiers,
            train=declared.train,
            sources=build.source_digests(package.parent),
            run=planned(config) if with_model else None,
            trainer=trainer.result(),
            engine=engine.result(),
            nvidia=gpus.result(),
        )


def _engine(config: Config | None, packages: Sequence[str]) -> PythonFacts | None:
    """Look into the engines' Python; None if it is this Python."""
    try:
        found = str(engine_python(config.engines.python if config is not None else None))
    except UserError as error:
        return PythonFacts("engines.python", unfinished=str(error.got))
    return None if found == sys.executable else pythons.look(found, packages)
