"""A run on this machine: the controller, engines and the trainer under torchrun, with a printed line for each step.

All launchers share `prepare` and `claim`, which check and write files before a process starts, and the supervision in
`asyncmoe.launch.watch`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from asyncmoe import checkpoints, installed, interrupts, models, plugins, storage
from asyncmoe.checkpoints import copier
from asyncmoe.checkpoints.intact import Survey
from asyncmoe.config import Config, devices, moved, sglang_arguments
from asyncmoe.config.trainer import no_gpu_for
from asyncmoe.doctor.pythons import check_engine_python
from asyncmoe.engines import succession
from asyncmoe.engines.engine_python import engine_python
from asyncmoe.errors import ConfigError, Faults, UserError, together
from asyncmoe.launch import commands, plugin_probe, preflight
from asyncmoe.launch.commands import EngineMachine, Launch, Launcher
from asyncmoe.launch.rule import CONTROLLER, TRAINER
from asyncmoe.launch.run_processes import STOP_GRACE_S, Process, RunParts
from asyncmoe.launch.torchrun import free_port
from asyncmoe.launch.watch import supervise
from asyncmoe.log import belonging
from asyncmoe.models import origin
from asyncmoe.models.lora import peft
from asyncmoe.models.make import make_model, to_make
from asyncmoe.plan import budget
from asyncmoe.process import WARNING, Child, wait_until
from asyncmoe.rollout import parts, run_log
from asyncmoe.rpc import address
from asyncmoe.telemetry import processes, versions
from asyncmoe.telemetry.heartbeats import TRAINER as RANKS
from asyncmoe.telemetry.loggers import checks as loggers
from asyncmoe.telemetry.prometheus import Prometheus
from asyncmoe.telemetry.samples import records as samples

_RECORDS = (
    *("metrics.jsonl", "rollout.jsonl", "evaluation.jsonl", "summary.json", "report.html", versions.VERSIONS),
    *("spans-trainer.jsonl", "spans-controller.jsonl"),
)
"""Records that a new run in the directory would append to, or that would be mistaken for its own."""


def run(config: Config, by: Callable[[Config, RunParts, Callable[[], None]], dict[str, object]] = supervise) -> dict[str, object]:
    """Run a configuration from start to end and return its summary.

    Args:
        by: supervises the run's parts; the last argument ends them all.

    Raises:
        UserError: the configuration, the model, the run directory or this machine's GPUs cannot be used.
        AsyncmoeError: a process failed; the message is that process's own.
        Interrupted: the user stopped the run; the text says what is saved.
    """
    with claim(config.run.dir):
        with interrupts.stopping(interrupts.NO_RUN_YET):
            end_left(config.run.dir, engines=not config.engines.join)
            found = check(config)  # first, because the checks of the machine call a user's own family
            for line in preflight.check(config):
                print(f"{WARNING}{line}", file=sys.stderr, flush=True)
            file = prepare(config, found)
        local = _LocalParts(config.run.dir)
        return by(config, local.table(config, file), local.end_all)


def check(config: Config, *known: UserError, weights: bool = True, whole: bool = False) -> Survey:
    """Check everything that can be checked before a process starts; write nothing. Return the checkpoints found.

    Args:
        known: errors that are raised with those found here.
        weights: the model's weights are on this machine; their headers are then compared with its configuration.
        whole: also try tasks, scorer, teacher and environment, as the first worker of a run does; always done if another check fails.

    Raises:
        UserError: names everything that cannot be used: the model, the engines' Python, the user's own parts, the run directory.
    """
    faults, here = Faults(*known), config.launch == "local"
    faults.of(check_place, config.run.dir)
    if config.sync.directory is not None:
        faults.of(check_place, config.sync.directory, "sync.directory")
    faults.of(loggers.check, config.telemetry)
    if here and config.log.redis is not None:  # the server may be unable to keep the log
        faults.of(_check_redis, str(config.log.redis))
    if not here:
        faults.of(commands.engine_machines, config)  # refuses engines that cannot be spread
    own = faults.of(plugin_probe.check, config)
    if own is None and plugins.is_name(config.model.family):  # its code may end this process
        faults.refuse()
    for key, value in config.trainer.needs_gpu if here and devices.none_here() else ():
        faults.add(no_gpu_for(key, value))  # the trainer would refuse it a minute later
    hf = faults.of(_checked_model, config, weights)
    if here and config.engines.nodes > 1 and config.engines.dp_attention > 1:
        faults.of(_check_address, config.cluster.network)
    faults.of(copier.check, config)
    found = faults.of(checkpoints.survey, config.run.dir)
    for line in found.lines if found else ():
        print(line, file=sys.stderr, flush=True)
    if found and hf:
        faults.of(_check_going_on, config, hf, found.newest)
    nodes = max(config.cluster.trainer_nodes, config.cluster.engine_nodes)
    if not config.checkpoint_every and (nodes > 1 or address.several(config.cluster.network)):
        lost = "got 0 on several nodes; with 20, a lost node costs at most 20 steps"
        print(f"{WARNING}trainer.checkpoint_every: {lost}", file=sys.stderr, flush=True)
    if here and not config.engines.join:
        faults.of(check_engine_python, config.engines.python)  # last, because it starts an interpreter
    if whole or faults.found:
        faults.of(parts.try_all, config, own=own is not None)
    faults.refuse()
    assert found is not None
    return found


def _check_address(network: str) -> None:
    """Refuse a network whose address is this machine's loopback, as that of a host's name often is: groups of an engine's ranks meet in
    files only if the engine has one node. Raises UserError."""
    if network != "loopback" and (found := address.reachable(network)).startswith("127."):
        hint = "name an interface or a network (ib0, 10.1.0.0/16), or set ASYNCMOE_HOST to an address"
        raise ConfigError(
            "cluster.network", got=f"{network}, which is {found} here", expected="an address that other machines reach", hint=hint
        )


def _check_redis(url: str) -> None:
    installed.need("redis", "log.redis")
    from asyncmoe.log import redis

    redis.RedisServer(url, patience_s=0.0).check()


def _checked_model(config: Config, weights: bool) -> Mapping[str, Any]:
    """Return the configuration of the model, checked together with the run's sizes and adapter, and the host's memory."""
    hf = budget.hf_of(config)
    there = weights and not to_make(config.model, config.run.dir)
    models.check(config, hf, weights=config.model.path if there else None)
    _check_adapter(config, hf)
    pins = config.trainer.memory.optimizer_offload or (config.in_turn and not devices.none_here())
    if config.launch == "local" and pins:
        budget.check_host(config, budget.of_run(config, hf), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return hf


def _check_going_on(config: Config, hf: Mapping[str, Any], newest: Path | None) -> None:
    """Refuse to resume with a configuration other than that of the run in the directory; name everything that differs."""
    begun = config.model.path.exists() and belonging.has_begun(config.run.dir)
    if (begun or newest is not None) and (found := [*origin.differing(config, hf, newest)]):
        raise together(found)
    if newest is not None and int(checkpoints.facts(newest)["step"]) == config.warmup.steps + config.run.steps:
        taken = f"all {config.run.steps} steps are taken already; a higher number goes on from {newest}"
        print(f"run.steps: {taken}", file=sys.stderr, flush=True)
    if begun:
        run_log.belonging_of(config, models.recording(config, hf))  # the controller would refuse it after the start


def prepare(config: Config, found: Survey | None = None) -> Path:
    """Write and return the file that all processes read. `found`: the result of `check`; without it, `check` is called."""
    found = found or check(config)
    if (port := config.telemetry.prometheus_port) is not None:
        Prometheus(port).close()  # refuses a port that is taken
    copier.try_to_write(config)
    for damaged in found.damaged:
        aside = checkpoints.set_aside(damaged.path)
        print(f"damaged checkpoint {damaged.path.name} is now {aside}; delete it when you have looked at it", file=sys.stderr, flush=True)
    if config.model.make is not None and to_make(config.model, config.run.dir):
        make_model(config.model.path, config.model.make, seed=config.run.seed)
        print(f"model.make: wrote a random model to {config.model.path}", file=sys.stderr, flush=True)
    if found.newest is None and not belonging.has_begun(config.run.dir):
        for stale in _RECORDS:
            (config.run.dir / stale).unlink(missing_ok=True)
        for stale in ("tensorboard", samples.FOLDER, "loggers", "profile"):
            shutil.rmtree(config.run.dir / stale, ignore_errors=True)
    (config.run.dir / succession.FILE).unlink(missing_ok=True)  # only a controller restarted by this launcher takes engines over
    file, kept = config.run.dir / moved.FILE, json.dumps(origin.origin_of(config), indent=1)
    with storage.writing("configuration of the run", file):
        storage.make_private(config.run.dir)
        given = yaml.safe_dump(moved.absolute(config).model_dump(mode="json"), sort_keys=False)
        storage.replace(config.run.dir / origin.FILE, kept.encode())
        storage.replace(file, given.encode())
        versions.record(config.run.dir, engine_python(config.engines.python))
    return file


def check_place(directory: Path, key: str = "run.dir") -> None:
    """Refuse the directory of a key if it cannot be created or written to; a folder created for this check is removed.

    Raises:
        ConfigError: it cannot be created, for example below /proc or a dangling link.
        StorageError: see `asyncmoe.storage.writing`; a parent is a file, or this user may not write there.
    """
    if barren := storage.try_place("run directory" if key == "run.dir" else key, directory):
        raise ConfigError(key, got=f"{directory}, but {barren}", expected="a writable directory")


@contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Create a run directory, and lock it against other launchers within the block. If the block writes nothing there, because the run is
    refused, everything is left as it was.

    Raises:
        ConfigError, StorageError: see `check_place`.
        UserError: another launcher holds the lock.
    """
    check_place(directory)
    made = [one for one in (directory, *directory.absolute().parents) if not one.exists()]
    with storage.writing("run directory", directory):
        storage.make_private(directory)
        before, file = {*os.listdir(directory)}, directory / ".lock"
        lock = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        os.fchmod(lock.fileno(), 0o600)  # whoever can open it can lock it
    if not storage.lock_alone(lock):  # without locks, a second controller of the run is still refused
        raise UserError("run.dir", got=f"{directory}, in use by another run", expected="a directory that no other run uses")
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):  # it was moved or deleted meanwhile
                if {*os.listdir(directory)} - before == {file.name}:
                    file.unlink()
                    for folder in made:
                        folder.rmdir()


def _check_adapter(config: Config, hf: Mapping[str, Any]) -> None:
    """Refuse an adapter whose rank exceeds the engines' limit, and a start adapter that does not match the model or the configuration."""
    section, kind = config.adapter, models.adapter_of(config, hf)
    if section is None or kind is None:
        return
    limit = sglang_arguments.number(config.engines.args, "--max-lora-rank")
    if limit is not None and kind.rank > limit:
        expected = f"at most {limit}, the --max-lora-rank of engines.args"
        raise ConfigError("lora.rank", got=kind.rank, expected=expected, hint="raise --max-lora-rank, or lower lora.rank")
    if section.start is not None:
        peft.start_from(section.start, models.shape_of(hf), kind, str(config.model.path))


class _LocalParts:
    """The parts of a run on this machine, and the newest process of each."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: dict[str, Child] = {}

    def start(self, _: None, launch: Launch) -> Process:
        """Start a part; all its starts append to one log."""
        child = Child(launch.name, [sys.executable, *launch.arguments], launch.log, launch.environment)
        self._children[launch.name] = child
        return child

    def end(self, name: str, engine_s: float = 0.0) -> None:
        """End a part: the trainer gets time to stop; any other part is killed after `engine_s`, because a part that hangs must not wake up
        beside its successor."""
        if (child := self._children.get(name)) is not None:
            child.end(STOP_GRACE_S if name == TRAINER else engine_s)
        if name == TRAINER:
            _kill(self._run_dir, RANKS)

    def end_all(self) -> None:
        """Ask all parts to end, and kill those that do not in time."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        for name in reversed(self._children):
            self.end(name, STOP_GRACE_S)

    def table(self, config: Config, file: Path) -> RunParts:
        """Return the parts. `file`: the configuration that all processes read."""
        numbers = tuple(range(0 if config.engines.join else config.engines.count))
        engines = [(None, EngineMachine(numbers, node)) for node in range(config.engines.nodes)]
        launcher = Launcher(engines, [None], self.start, self.end, lambda _: ("127.0.0.1", free_port("127.0.0.1")), spare=True)
        return commands.table(config, file, launcher)


def end_left(run_dir: Path, *, engines: bool) -> None:
    """Wait for the processes that a lost launcher of the run left on this host, and kill those that do not end in time: parts get SIGTERM
    when their launcher ends.

    Args:
        engines: True if launchers start engines here.
    """
    recorded = processes.read(run_dir)
    if any(processes.runs(one) for one in recorded if one.role == "supervisor"):
        return
    roles = (CONTROLLER, RANKS, *(["engine."] if engines else []))
    left = [one for one in recorded if one.role.startswith(roles) and processes.runs(one)]
    if not wait_until(lambda: not any(map(processes.runs, left)), STOP_GRACE_S):
        _kill(run_dir, *roles)


def _kill(run_dir: Path, *roles: str) -> None:
    """Send SIGKILL to every process of a run that still runs on this host and whose role begins with one of `roles`."""
    for one in processes.read(run_dir):
        if one.role.startswith(roles) and processes.runs(one):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(one.pid, signal.SIGKILL)
