"""`asyncmoe plan`: plan the run of a YAML file, or the split of a cluster's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncmoe import config as configuration
from asyncmoe import models
from asyncmoe.config.loading import section
from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import ConfigError
from asyncmoe.models.checks import UNTRAINED, untrained_layers
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind, kind_of
from asyncmoe.models.shape import Shape
from asyncmoe.plan import budget, disk, render_plan, speeds, switch, traffic
from asyncmoe.plan.one_node import of_node, seconds
from asyncmoe.plan.split import Cluster, suggest

GPU_GB = 80.0
"""Default memory of a GPU in GB."""


def of_run(path: Path, overrides: Sequence[str], model: Path | None, gpu_gb: float | None, nic: float, console: Console) -> dict[str, Any]:
    """Print the plan of a run, and return it as values for JSON.

    Args:
        overrides: keys of the configuration, key.path=value.
        model: a config.json or its directory, in place of `model.path`.
        gpu_gb: memory of a GPU in GB (1e9 bytes); None: `GPU_GB`, or `budget.CPU_GB` for a run on CPUs.
        nic: GB per second that a rank sends while it receives at the same rate.

    Raises:
        ConfigError: the configuration is refused, or its sizes do not suit the model.
        DataError: a file cannot be read.
        UserError: unsupported model family.
    """
    config = configuration.load(path, overrides)
    hf = budget.hf_of(config, model)
    models.check(config, hf)
    cpu = budget.for_cpu(config)
    found = budget.of_run(config, hf, gpu_gb or (budget.CPU_GB if cpu else GPU_GB), cpu)
    if config.in_turn:
        moves = switch.of_run(config, hf)
        render_plan.show_switch(moves, console)
        moved = {"switch": {name: asdict(move) for name, move in moves.items()}}
    else:
        sizes = models.trainer_parallel(config), models.engine_parallel(config), config.engines.count
        dtype, adapter = models.engine_dtype(hf, config.engines), budget.serving(config, hf, cpu).adapter
        forecast = traffic.foresee(hf, *sizes, dtype=dtype, adapter=adapter, nic=nic)
        render_plan.show_update(forecast, render_plan.kind(hf, dtype, adapter is not None), config.sync.method, nic, console)
        moved = {"update": asdict(forecast)}
    render_plan.show_budget(found, console)
    kept = disk.of_run(config, hf)
    render_plan.show_disk(kept, console)
    columns = {"trainer": dict(found.trainer.parts), "engine": dict(found.engine.parts)}
    host = {"trainer": dict(found.host), "engine": dict(found.engine.host)}
    columns |= {turn: {"trainer": one.total, "engine": other.total} for turn, (one, other) in found.phases.items()}
    return {**moved, "memory": columns, "host_memory": host, "disk": asdict(kept), "fits": not found.refusals}


def of_cluster(
    cluster: Cluster, model: Path, family: str, lora: str | None, measured: Path | None, nic: float, console: Console
) -> dict[str, Any]:
    """Print suggestions for a cluster, and return them as values for JSON.

    Args:
        cluster: the cluster, to which `lora` adds an adapter.
        family: as `model.family`.
        lora: see `parse_adapter`.
        measured: a file written by `asyncmoe bench step`.
        nic: as in `of_run`; on one node, NVLink's is taken.

    Raises:
        ConfigError: nothing fits, or a run would refuse the model or the suggested sizes.
        DataError: a file cannot be read.
        UserError: unsupported model family.
    """
    hf = models.with_family(models.load_hf_config(model), family)
    context = min(cluster.context, hf.get("max_position_embeddings") or cluster.context)
    cluster = replace(cluster, context=context, adapter=None if lora is None else parse_adapter(lora, models.shape_of(hf)))
    known, found = None if measured is None else speeds.read(measured, hf), []
    nic = nic if cluster.nodes > 1 else switch.H100.between / 1e9
    for split in suggest(hf, cluster, known) if cluster.nodes > 1 else of_node(hf, cluster, known):
        run = {"run": {"dir": "run", "steps": 1}, "model": {"path": str(model)}, "task": {"kind": "arithmetic"}}
        models.check(configuration.parse({**run, **render_plan.sections(split)}), {**hf, **dict.fromkeys(hf.keys() & UNTRAINED, 0)})
        sizes, first = (split.trainer.parallel, split.engine.parallel, split.engines), 0 if split.cluster.in_turn else None
        forecast = traffic.foresee(hf, *sizes, adapter=cluster.adapter, nic=nic, first=first)
        tokens = render_plan.BATCH * render_plan.GROUP * (cluster.context / 2 if known is None else known.lengths.response)
        found.append((split, forecast, seconds(split, forecast, tokens)))
    render_plan.show_splits(found, cluster, hf, measured, nic, console)
    for fault in untrained_layers(hf):
        console.print(f"A run refuses this model as it is: {fault}", markup=False, highlight=False, soft_wrap=True)
    return {"splits": [{**asdict(split), "update": asdict(forecast), "step_s": parts} for split, forecast, parts in found]}


def parse_adapter(text: str, m: Shape) -> Kind:
    """Parse `rank=32` or `rank=32,experts=shared_outer,targets=q_proj+v_proj`; the default is all targets of the model.

    Raises:
        ConfigError: any other syntax, or a value that the section `lora` of a configuration refuses.
    """
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not given.keys() <= {"rank", "experts", "targets"} or "rank" not in given or len(given) <= text.count(","):
        raise ConfigError("--lora", got=repr(text), expected="rank=32, optionally with experts=shared_outer or targets=q_proj+v_proj")
    values: dict[str, Any] = {**given, "targets": given["targets"].split("+")} if "targets" in given else given
    kind = kind_of(section(LoraSection, values, "lora"), m)
    halves.check(kind, m)
    return kind
