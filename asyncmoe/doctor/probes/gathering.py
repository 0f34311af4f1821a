"""Run all probes concurrently."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import asyncmoe
from asyncmoe import build
from asyncmoe.config import Config
from asyncmoe.doctor.facts import Machine, RunFacts
from asyncmoe.doctor.probes import config_probe, machine, nvidia, pythons, sandbox_probe
from asyncmoe.doctor.probes.timeouts import Later
from asyncmoe.doctor.python_facts import PythonFacts
from asyncmoe.engines.engine_python import engine_python
from asyncmoe.errors import UserError

_REST_S = 90.0


def gather(path: Path | None, overrides: Sequence[str] = ()) -> Machine:
    """Gather the facts of this machine and of the configuration at `path`, if any."""
    return _gather(*((None, None) if path is None else config_probe.read(path, overrides)))


def gather_for(config: Config) -> Machine:
    """Gather the facts of this machine and of a loaded configuration."""
    return _gather(config, config_probe.of(config, str(config.run.dir)))


def _gather(config: Config | None, run: RunFacts | None) -> Machine:
    package = Path(asyncmoe.__file__).resolve().parent
    checkout = package.parent
    declared = pythons.declared(checkout)
    packages = sorted({*declared.specifiers, "apex"} - {"python"})
    trainer = Later(lambda: pythons.look(sys.executable, packages))
    engine = Later(lambda: _engine(config, packages))
    gpus, net, clock = Later(nvidia.look), Later(machine.network), Later(machine.clock)
    programs = Later(sandbox_probe.look)
    if config is not None and run is not None:
        run = config_probe.with_files(run, config)
    return Machine(
        host=socket.gethostname(),
        asyncmoe=f"{declared.version} ({build.package_digest(package)[:12]})",
        kernel=platform.platform(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=machine.memory(),
        requirements=declared.specifiers,
        train=declared.train,
        sources=build.source_digests(checkout),
        trainer=trainer.result(sys.executable, "the end of its imports", 2 * pythons.LOOK_S),
        engine=engine.result("the engines' Python", "the end of its imports", 2 * pythons.LOOK_S),
        nvidia=gpus.result("nvidia-smi", "its answers", _REST_S),
        fabric=machine.fabric(),
        limits=machine.limits(),
        network=net.result("the name service", "its answers", _REST_S),
        clock=clock.result("timedatectl", "its answer", _REST_S),
        run=run,
        sandbox=programs.result("the sandbox of the tool python", "the end of a program", _REST_S),
    )


def _engine(config: Config | None, packages: Sequence[str]) -> PythonFacts | None:
    """Probe the engines' Python; None if it is this Python."""
    configured = config.engines.python if config is not None else None
    try:
        found = str(engine_python(configured))
    except UserError:
        return PythonFacts(str(configured), unfinished="there is no such file")
    return None if found == sys.executable else pythons.look(found, packages)
