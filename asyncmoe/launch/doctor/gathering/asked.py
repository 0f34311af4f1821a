"""What a configuration asks of the machine: ports, room on disk and in shared memory, its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from asyncmoe import checkpoints
from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, WaitTimeout
from asyncmoe.launch.doctor.facts import Disk, Run
from asyncmoe.launch.doctor.gathering import disk, model, network
from asyncmoe.launch.doctor.gathering.later import Later

T = TypeVar("T")
_FILES_S = 30.0
"""A healthy parallel file system answers within one."""
_OPTIMIZER_BYTES = 12
"""Of each parameter: Adam's two moments and a copy to update, in float32."""
_ANY = ""
"""All addresses."""


def read(path: Path, overrides: Sequence[str]) -> tuple[Config | None, Run]:
    """The configuration and what it asks; None: it is not valid, and the second says why."""
    try:
        config = configuration.load(path, overrides)
    except ConfigError as error:
        return None, Run(str(path), trouble=str(error))
    run = Run(
        config=str(path),
        digest=config.digest,
        network=config.cluster.network,
        clock_s=config.cluster.clock_s,
        connections=config.rollout.max_concurrent,
        keep_checkpoints=config.trainer.keep_checkpoints,
        ports=network.try_ports(_ports(config)),
    )
    return config, run


def _ports(config: Config) -> list[tuple[str, str, int]]:
    """Those that are not any free one."""
    engines, cluster = config.engines, config.cluster
    wanted = [("engines.port", engines.host, engines.port + index) for index in range(engines.count) if engines.port]
    if cluster.port:
        wanted.append(("cluster.port", _ANY, cluster.port))
    if config.telemetry.prometheus_port is not None:
        wanted.append(("telemetry.prometheus_port", _ANY, config.telemetry.prometheus_port))
    return wanted


def with_files(run: Run, config: Config) -> Run:
    """With its directory and its model, and what follows from the model's size."""
    found_disk, disk_trouble = _answer(lambda: _disk(config), "run.dir")
    found_model, model_trouble = _answer(lambda: model.look(config), "model.path")
    run = replace(run, disk=found_disk, disk_trouble=disk_trouble, model=found_model, model_trouble=model_trouble)
    if found_model is None or found_model.parameters is None or found_model.weights_bytes is None:
        return run
    item = 2 if config.trainer.dtype == "bfloat16" else 4
    over_shm = config.sync.method == "reshard" and config.sync.transport in ("auto", "shm")
    under_way = 2 * min(config.trainer.ranks * config.sync.bucket_bytes, config.engines.count * found_model.weights_bytes)
    return replace(run, checkpoint_bytes=found_model.parameters * (item + _OPTIMIZER_BYTES), shm_bytes=under_way if over_shm else 0)


def _answer(work: Callable[[], T], whom: str) -> tuple[T | None, str | None]:
    """What a question to a file system gave, or why it gave nothing."""
    try:
        return Later(work).result(f"the file system of {whom}", "an answer", _FILES_S), None
    except (OSError, ImportError, WaitTimeout) as error:
        return None, str(error)


def _disk(config: Config) -> Disk:
    kept = config.run.dir / "checkpoints"
    complete = checkpoints.newest(config.run.dir)
    count = len([path for path in kept.iterdir() if not path.suffix]) if complete else 0
    return disk.look(config.run.dir, count)
