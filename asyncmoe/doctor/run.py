"""Checks of a configuration on this machine: whether it is valid, its ports, address and run directory."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncmoe import checkpoints
from asyncmoe import config as configured
from asyncmoe.config import Config
from asyncmoe.doctor import finding, programs
from asyncmoe.doctor.finding import Finding
from asyncmoe.doctor.planned import PlannedRun
from asyncmoe.errors import UserError
from asyncmoe.process import WARNING
from asyncmoe.rpc import address
from asyncmoe.storage import size

_VALIDATE_S = 900.0
"""Timeout in seconds: longer than any wait of `asyncmoe config validate` except that for an unresponsive file system."""


def configuration(words: Sequence[str]) -> tuple[Config | None, Finding]:
    """Load a configuration, and run `asyncmoe config validate` on it in a separate process. Return None if it cannot be loaded.

    Args:
        words: the file and KEY=VALUE overrides.
    """
    if not words:
        return None, finding.absent("no CONFIG was given", "asyncmoe doctor CONFIG also looks at its model, ports, run directory and GPUs")
    done = programs.run([sys.executable, "-m", "asyncmoe", "config", "validate", *words], _VALIDATE_S)
    if done.late:
        return None, finding.error(f"{done.trouble}", "check that the configured file systems are mounted and respond (df, mount)")
    config = None
    with suppress(UserError):
        config = configured.load(Path(words[0]), words[1:])
    if done.trouble is None:
        warned = [line.removeprefix(WARNING) for line in done.errors.splitlines() if line.startswith(WARNING)]
        return config, finding.warning(done.text.strip(), "; ".join(warned)) if warned else finding.ok(done.text.strip())
    said = done.errors.partition("error: ")[2].strip() or programs.last_line(done.errors) or done.trouble
    return config, finding.error(said, "correct that; examples/demo.yaml is a valid configuration")


def ports(config: Config) -> Finding:
    """Check that the configured ports are free."""
    engines, wanted = config.engines, {"cluster.port": config.cluster.port, "telemetry.prometheus_port": config.telemetry.prometheus_port}
    wanted |= {f"engines.port + {index}": engines.port + index for index in range(engines.count) if engines.port}
    given = {key: number for key, number in wanted.items() if number}
    for key, number in given.items():
        try:
            socket.create_server(("", number)).close()
        except OSError as error:
            hint = f"ss -ltnp 'sport = :{number}' names the process that has the port; end it, or choose another port (0: any free one)"
            return finding.error(f"{key} {number}: {os.strerror(error.errno or 0)}", hint)
    told = ", ".join(f"{key} {number}" for key, number in given.items())
    return finding.ok(f"{told} can be listened on" if told else "the configuration uses any free ports")


def network(config: Config) -> Finding:
    """Check that this machine has an address at which others reach it."""
    try:
        return finding.ok(f"others reach this machine at {address.reachable(config.cluster.network)}")
    except UserError as error:
        return finding.refused(error)


def run_dir(config: Config, run: PlannedRun | None) -> Finding:
    """Check that the run directory has room for the checkpoints kept at once."""
    folder = config.run.dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, each = os.statvfs(there).f_bavail * os.statvfs(there).f_frsize, 0
    if run is not None:
        from asyncmoe.plan import disk  # needs asyncmoe's extension, without which the doctor must still run

        each = disk.checkpoint_bytes(config, run.hf)
    told = f"{config.run.dir}: {size(free)} free" + (f"; a checkpoint takes about {size(each)}" if each else "")
    kept = sum(not path.suffix for path in (folder / "checkpoints").iterdir()) if checkpoints.newest(folder) else 0
    more = max(1, config.trainer.keep_checkpoints + 1 - kept)
    if free < more * each:
        judge = finding.error if free < each else finding.warning
        hint = "free space, choose another run.dir, or keep fewer checkpoints (trainer.keep_checkpoints)"
        return judge(f"{told}, and the run may add {more} before it deletes a checkpoint", hint)
    return finding.ok(told)
