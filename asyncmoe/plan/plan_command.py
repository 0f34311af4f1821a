"""`asyncmoe plan`: plan given sizes, a run's YAML, or the split of a cluster's nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.plan import budget, memory, render_plan, savings, traffic
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import EngineMemory, GpuMemory, Training
from asyncmoe.plan.savings import Savings
from asyncmoe.plan.sizes import check_dtype, context_ranks, parse_adapter, parse_engines, parse_trainer
from asyncmoe.plan.split import Cluster, suggest
from asyncmoe.plan.traffic import Forecast, Speeds


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of the command line; None for a missing one.

    Attributes:
        overrides: keys of the configuration, key.path=value.
        context: tokens of the longest conversation and of a micro-batch.
    """

    model: Path | None
    trainer: str | None
    engines: str | None
    nodes: int | None
    config: Path | None
    overrides: tuple[str, ...] = ()
    gpus_per_node: int = 8
    gpu_gb: float | None = None
    context: int = 8192
    dtype: str = "bfloat16"
    bucket_bytes: int = 256 << 20
    speeds: Speeds = Speeds()  # noqa: RUF009  frozen
    lora: str | None = None
    family: str = "auto"

    @property
    def gb(self) -> float:
        return 80.0 if self.gpu_gb is None else self.gpu_gb


def run(asked: PlanArguments, console: Console) -> dict[str, Any]:
    """Print the requested plan, and return it as values for JSON.

    Raises:
        ConfigError: not exactly one of the three kinds of plan, or impossible sizes.
        DataError: a file cannot be read.
        UserError: unsupported model family.
    """
    ways = {
        "--trainer (and --engines)": asked.trainer is not None or asked.engines is not None,
        "--nodes": asked.nodes is not None,
        "--config": asked.config is not None,
    }
    given = [name for name, is_given in ways.items() if is_given]
    if asked.overrides and asked.config is None:
        hint = "the YAML file of a run is given as asyncmoe plan --config FILE"
        raise UserError("asyncmoe plan", got=" ".join(asked.overrides), expected="options only", hint=hint)
    if len(given) != 1:
        raise ConfigError("asyncmoe plan", got=" and ".join(given) or "none of them", expected=f"one of {'; '.join(ways)}")
    if not 0 < asked.gb < math.inf:
        raise ConfigError("--gpu-gb", got=asked.gb, expected="a positive number of GB")
    if asked.config is not None:
        return _of_run(asked, asked.config, console)
    if asked.model is None:
        raise ConfigError("--model", got="nothing", expected="config.json of a Hugging Face model, or its directory")
    if asked.nodes is None and asked.trainer is None:
        raise ConfigError("--trainer", got="nothing", expected="sizes, because those of --engines are given")
    hf = models.with_family(models.load_hf_config(asked.model), asked.family)
    return _of_sizes(asked, hf, console) if asked.nodes is None else _of_cluster(asked, hf, asked.nodes, console)


def _of_sizes(asked: PlanArguments, hf: Mapping[str, Any], console: Console) -> dict[str, Any]:
    assert asked.trainer is not None
    if asked.engines is None:
        return _of_trainer(asked, hf, asked.trainer, console)
    count, engine = parse_engines(asked.engines)
    found = _forecast(asked, hf, parse_trainer(asked.trainer), engine, count)
    columns = _trainers(asked, asked.trainer, hf)
    serving = EngineMemory(0, dtype=found.dtype, adapter=found.adapter, bucket_bytes=asked.bucket_bytes)
    staged = memory.kv_room(hf, found.engine, serving, asked.gb) >= memory.LEAST * asked.context
    columns["engine"], tokens = memory.engine_filled(hf, found.engine, replace(serving, staged=staged), asked.gb)
    render_plan.show(found, console, context_ranks(asked.trainer))
    render_plan.show_updates(found, staged, console)
    render_plan.show_memory(columns, asked.gb, console)
    render_plan.show_room(tokens, staged, asked.context, console)
    return {**asdict(found), "memory": _values(columns), "kv_tokens": tokens}


def _of_trainer(asked: PlanArguments, hf: Mapping[str, Any], sizes: str, console: Console) -> dict[str, Any]:
    check_dtype(asked.dtype)
    columns = _trainers(asked, sizes, hf)
    way = savings.cheapest(hf, parse_trainer(sizes), _training(asked, sizes, hf, recompute=False), asked.gb)
    if way is not None:
        columns["cheapest with room"] = way.memory
    render_plan.show_memory(columns, asked.gb, console)
    console.print(_said(way), markup=False, highlight=False, soft_wrap=True)
    return {"memory": _values(columns), "cheapest": None if way is None else way.keys}


def _trainers(asked: PlanArguments, sizes: str, hf: Mapping[str, Any]) -> dict[str, GpuMemory]:
    columns: dict[str, GpuMemory] = {}
    for name, recompute in (("trainer", False), ("trainer, recomputing", True)):
        training = _training(asked, sizes, hf, recompute)
        columns[name] = max(memory.trainer(hf, parse_trainer(sizes), training), key=lambda stage: stage.total)
    return columns


def _training(asked: PlanArguments, sizes: str, hf: Mapping[str, Any], recompute: bool) -> Training:
    cp = context_ranks(sizes)
    microbatch = Microbatch(-(-asked.context // cp), recompute, asked.dtype, _adapter(asked, hf), cp=cp)
    return Training(microbatch, bucket_bytes=asked.bucket_bytes)


def _adapter(asked: PlanArguments, hf: Mapping[str, Any]) -> Kind | None:
    return None if asked.lora is None else parse_adapter(asked.lora, models.family_of(hf).shape_of(hf))


def _forecast(asked: PlanArguments, hf: Mapping[str, Any], trainer: MegatronParallel, engine: EngineParallel, count: int) -> Forecast:
    name, kind, dtype, bucket = str(asked.model), _adapter(asked, hf), asked.dtype, asked.bucket_bytes
    return traffic.foresee(name, hf, trainer, engine, count, dtype=dtype, bucket_bytes=bucket, speeds=asked.speeds, adapter=kind)


def _of_cluster(asked: PlanArguments, hf: Mapping[str, Any], nodes: int, console: Console) -> dict[str, Any]:
    check_dtype(asked.dtype)
    cluster = Cluster(nodes, asked.gpus_per_node, asked.gb, asked.context, _adapter(asked, hf), asked.dtype, asked.bucket_bytes)
    splits = suggest(hf, cluster)
    found = [(split, _forecast(asked, hf, split.trainer.parallel, split.engine.parallel, split.engines)) for split in splits]
    render_plan.show_splits(found, cluster, console)
    return {"splits": [{**asdict(split), "sync": asdict(forecast)} for split, forecast in found]}


def _of_run(asked: PlanArguments, path: Path, console: Console) -> dict[str, Any]:
    config = configuration.load(path, asked.overrides)
    hf = budget.hf_of(config, asked.model)
    models.check(config, hf)
    cpu = budget.for_cpu(config)
    found = budget.of_run(config, hf, budget.CPU_GB if cpu and asked.gpu_gb is None else asked.gb, cpu)
    sizes = models.trainer_parallel(config), EngineParallel(config.engines.tp, config.engines.ep), config.engines.count
    name, dtype, bucket = str(asked.model or config.model.path), models.engine_dtype(hf, config.engines), config.sync.bucket_bytes
    kind = budget.serving(config, hf, cpu).adapter
    forecast = traffic.foresee(name, hf, *sizes, dtype=dtype, bucket_bytes=bucket, speeds=asked.speeds, adapter=kind)
    columns = {"trainer": found.trainer, "engine": found.engine}
    if found.shared:
        columns["both on a GPU"] = GpuMemory({f"the {name}": one.total for name, one in columns.items()})
    if config.sync.method == "reshard":
        render_plan.show(forecast, console, config.trainer.cp)
    else:
        render_plan.show_whole(forecast, config.sync.method, console)
    render_plan.show_memory(columns, found.gpu_gb, console)
    size = config.engines
    spread = f"An engine takes {size.ranks_per_node} GPUs on each of {size.nodes} machines." if size.nodes > 1 else ""
    lines = filter(None, (*found.sums, spread, found.line, found.host_line))
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if not (cpu or found.fits):
        beside = found.engine.total if found.shared else 0
        way = savings.cheapest(hf, models.trainer_parallel(config), budget.training(config, hf), found.gpu_gb, beside)
        console.print(_said(way), markup=False, highlight=False, soft_wrap=True)
    host = {name: getattr(found, name.replace(" ", "_")) for name in ("checkpoint copy", "optimizer state", "reference")}
    return {**asdict(forecast), "memory": _values(columns), "host_memory": host}


def _said(way: Savings | None) -> str:
    """Return a line about the cheapest settings with which a trainer's GPUs have room."""
    if way is None:
        return "A trainer's GPUs have no room with any of recomputation and trainer.memory: take more ranks, or a larger tp, pp or cp."
    host = f", and {way.host_bytes / 1e9:.3g} GB of host memory for each" if way.host_bytes else ""
    said = f"{' '.join(way.keys) or 'the defaults'} ({way.memory.total / 1e9:.3g} GB{host})"
    return f"The cheapest settings with room on a trainer's GPUs: {said}"


def _values(columns: dict[str, GpuMemory]) -> dict[str, Any]:
    return {name: dict(one.parts) for name, one in columns.items()}
