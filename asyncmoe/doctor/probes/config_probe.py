"""A configuration's demands on the machine: ports, disk, shared memory, GPUs, and a complete model of a supported family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from asyncmoe import checkpoints
from asyncmoe import config as configuration
from asyncmoe.config import Config, devices, sglang_arguments
from asyncmoe.config.environment import EnvironmentSection
from asyncmoe.config.transports import TRANSPORTS, TransportName, resolved, transport_for
from asyncmoe.doctor.facts import Disk, ModelFacts, OnGpus, RunFacts
from asyncmoe.doctor.probes import machine, plugin_probe, rollout_code
from asyncmoe.doctor.probes.timeouts import Later
from asyncmoe.errors import ConfigError, UserError, WaitTimeout
from asyncmoe.rpc import address

T = TypeVar("T")
_FILES_S = 30.0
"""Timeout in seconds; a healthy parallel file system answers within one."""
_OPTIMIZER_BYTES = 12
"""Optimizer bytes per parameter: Adam's two moments and the master weight, in float32."""
TAKES_FLOAT32 = frozenset({"triton", "torch_native", "flex_attention"})
"""SGLang's attention backends that support float32. Its default does not: on Hopper it is fa3 (sglang 0.5.23,
arg_groups/model_override_base.py), which supports float16, bfloat16 and float8."""
_FLOAT32 = "engines.dtype: got float32, which SGLang's attention on GPUs does not take, expected bfloat16"
_ANY = ""
"""The host that stands for all addresses."""


def read(path: Path, overrides: Sequence[str]) -> tuple[Config | None, RunFacts]:
    """Load a configuration and return it with its demands; None for an invalid one, with the reason in `RunFacts.trouble`."""
    try:
        config = configuration.load(path, overrides)
    except ConfigError as error:
        return None, RunFacts(str(path), trouble=str(error))
    return config, of(config, str(path))


def of(config: Config, name: str) -> RunFacts:
    """Return the demands of a valid configuration."""
    return RunFacts(
        config=name,
        digest=config.digest,
        network=config.cluster.network,
        max_clock_skew_s=config.cluster.max_clock_skew_s,
        connections=config.rollout.max_concurrent,
        keep_checkpoints=config.trainer.keep_checkpoints,
        ports=machine.try_ports(_ports(config)),
        sandbox=_sandbox(config.environment),
    )


def _sandbox(environment: EnvironmentSection) -> str | None:
    if environment.kind != "tools" or "python" not in environment.tools.names:
        return None
    if environment.sandbox.backend != "asyncmoe":
        return environment.sandbox.backend
    return "namespaces" if environment.tools.options.get("python", {}).get("namespaces", True) else "no namespaces"


def _ports(config: Config) -> list[tuple[str, str, int]]:
    """Return the fixed ports as (key, host, number)."""
    engines, cluster = config.engines, config.cluster
    wanted = [("engines.port", _ANY, engines.port + index) for index in range(engines.count) if engines.port]
    if cluster.port:
        wanted.append(("cluster.port", _ANY, cluster.port))
    if config.telemetry.prometheus_port is not None:
        wanted.append(("telemetry.prometheus_port", _ANY, config.telemetry.prometheus_port))
    return wanted


def with_files(run: RunFacts, config: Config) -> RunFacts:
    """Add the facts about the run directory and the model, and the sizes that follow from the model."""
    found_disk, disk_trouble = _answer(lambda: _disk(config), "run.dir")
    run = replace(run, disk=found_disk, disk_trouble=disk_trouble)
    run = replace(run, own=plugin_probe.named(config), own_trouble=_trouble(plugin_probe.check, config))
    run = replace(run, rollout_code=rollout_code.named(config), rollout_trouble=_trouble(rollout_code.check, config))
    if run.own_trouble is not None and plugin_probe.FAMILY in run.own:  # its code may not return here either
        what = f"it cannot be looked at with {plugin_probe.FAMILY} {run.own[plugin_probe.FAMILY]}: see the line own-code"
        return replace(run, model=ModelFacts(str(config.model.path), trouble=what))
    found_model, model_trouble = _answer(lambda: model(config), "model.path")
    asked_of_gpus, _ = _answer(lambda: _on_gpus(config), "model.path")
    run = replace(run, model=found_model, model_trouble=model_trouble, on_gpus=asked_of_gpus)
    if found_model is None or found_model.parameters is None or found_model.weights_bytes is None:
        return run
    item = 2 if config.trainer.weights_dtype == "bfloat16" else 4
    over_shm = config.sync.method == "reshard" and TRANSPORTS[resolved(config.sync.transport, gpu=False)].in_shm
    under_way = 2 * min(config.trainer.ranks * config.sync.bucket_bytes, config.engines.count * found_model.weights_bytes)
    return replace(run, checkpoint_bytes=found_model.parameters * (item + _OPTIMIZER_BYTES), shm_bytes=under_way if over_shm else 0)


def _trouble(check: Callable[[Config], None], config: Config) -> str | None:
    """Return what a check refuses; None if nothing."""
    try:
        check(config)
    except UserError as error:
        return str(error)
    return None


def _on_gpus(config: Config) -> OnGpus | None:
    """Return a configuration's demands on GPUs; None if unknown, for a reason that the check `model` reports."""
    # Layouts need asyncmoe's extension, whose presence the doctor only checks.
    from asyncmoe.plan import budget

    try:
        return on_gpus(config, budget.hf_of(config))
    except UserError:
        return None


def on_gpus(config: Config, hf: Mapping[str, Any]) -> OnGpus:
    """Return a configuration's demands on GPUs for the model with this config.json.

    Raises:
        UserError: the sizes do not suit the model.
    """
    from asyncmoe import models
    from asyncmoe.plan import budget
    from asyncmoe.trainer.model.features import run_features

    models.check(config, hf)
    trainer, engine = budget.least(config, hf)
    several = address.several(config.cluster.network)
    engine_dtype, trainer_float32 = models.engine_dtype(hf, config.engines), config.trainer.weights_dtype == "float32"
    float32 = engine_dtype == "float32" and sglang_arguments.value(config.engines.args, "--attention-backend") not in TAKES_FLOAT32
    return OnGpus(
        places=devices.wanted(config, several),
        way=_way(config, several),
        float32=_FLOAT32 if float32 else None,
        trainer_bytes=trainer.total,
        engine_bytes=engine.total,
        trainer_parts=trainer.parts,
        engine_parts=engine.parts,
        bfloat16=engine_dtype == "bfloat16" or not trainer_float32,
        transport=config.sync.transport if config.sync.method == "reshard" else None,
        megatron=config.trainer.megatron.model_dump(),
        features=run_features(hf, config, models.trainer_parallel(config), trainer_float32),
        trainer_nodes=config.cluster.trainer_nodes,
    )


def model(config: Config) -> ModelFacts:
    """Return the facts that are available from the headers of the weights.

    Raises:
        ImportError: asyncmoe's extension, which layouts need, is missing.
    """
    from asyncmoe import models
    from asyncmoe.models import hf_folder, make
    from asyncmoe.models.payload import Payload
    from asyncmoe.plan import budget
    from asyncmoe.reshard.layout import ITEM_BYTES

    path = config.model.path
    try:
        hf, making = budget.hf_of(config), make.to_make(config.model, config.run.dir)
        here = not config.engines.join and devices.none_here()
        models.check(config, hf, cpu_engines=here, weights=None if making else path)
    except UserError as error:
        return ModelFacts(str(path), trouble=str(error))
    if making:
        return ModelFacts(str(path), to_make=True)
    weights = _elements(Payload(hf).tensors().values())
    adapter = config.adapter and _elements(Payload(hf, models.adapter_of(config, hf)).tensors().values())
    return ModelFacts(
        path=str(path),
        family=str(hf["model_type"]),
        parameters=adapter or weights,
        weights_bytes=weights * ITEM_BYTES.get(models.engine_dtype(hf, config.engines), 2),
        trouble=next(map(str, hf_folder.tokenizer_faults(path)), None),
    )


def _way(config: Config, several: bool) -> TransportName:
    """Return the transport of weights between GPUs: "nccl" for a broadcast, and where the trainer refuses `sync.transport`, which the
    check `transport` reports."""
    if config.sync.method != "reshard":
        return "nccl"
    try:
        return transport_for(config.sync.transport, gpu=True, together=not several, shared=config.engines.share_gpus)
    except ConfigError:
        return "nccl"


def _answer(work: Callable[[], T], whom: str) -> tuple[T | None, str | None]:
    """Return the result of a file system query, or the reason why there is none."""
    try:
        return Later(work).result(f"the file system of {whom}", "an answer", _FILES_S), None
    except (OSError, ImportError, WaitTimeout) as error:
        return None, str(error)


def _disk(config: Config) -> Disk:
    kept = config.run.dir / "checkpoints"
    complete = checkpoints.newest(config.run.dir)
    count = len([path for path in kept.iterdir() if not path.suffix]) if complete else 0
    return machine.disk(config.run.dir, count)


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
