"""Gather the facts of this machine."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncmoe
from asyncmoe import build
from asyncmoe.config import Config
from asyncmoe.doctor import nvidia, pythons
from asyncmoe.doctor.facts import Machine
from asyncmoe.doctor.packages import SAVER
from asyncmoe.doctor.planned import planned
from asyncmoe.engines.engine_python import engine_python
from asyncmoe.rpc import nics


def gather(config: Config | None, with_model: bool = True) -> Machine:
    """Return the facts of this machine, and of the configuration, if any. Every program called has a time limit."""
    package = Path(asyncmoe.__file__).resolve().parent
    declared = pythons.declared(package.parent)
    names, engines = (*declared.specifiers, SAVER), str(engine_python(config.engines.python if config is not None else None))
    with ThreadPoolExecutor() as pool:
        trainer = pool.submit(pythons.look, sys.executable, names)
        engine = pool.submit(pythons.look, engines, names) if engines != sys.executable else None
        gpus = pool.submit(nvidia.look)
        return Machine(
            host=socket.gethostname(),
            requirements=declared.specifiers,
            train=declared.train,
            sources=build.source_digests(package.parent),
            run=planned(config) if with_model else None,
            trainer=trainer.result(),
            engine=engine.result() if engine is not None else None,
            nvidia=gpus.result(),
            nics=nics.look(),
        )
