"""Print and write the results of `asyncmoe plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from asyncmoe.models.quantised import float8_of
from asyncmoe.plan import speeds
from asyncmoe.plan.budget import OFFLOAD, Budget
from asyncmoe.plan.disk import Disk
from asyncmoe.plan.memory import MARGIN, ROUTES, USABLE, EngineMemory, GpuMemory, Hf, usable
from asyncmoe.plan.phases import backup, moved
from asyncmoe.plan.split import Cluster, Split
from asyncmoe.plan.switch import Move
from asyncmoe.plan.traffic import Forecast
from asyncmoe.storage import size
from asyncmoe.tables import grid, side_by_side

BATCH, GROUP = 384, 8
"""Prompts per step, and responses to each prompt, in the suggested simulation."""
Found = tuple[Split, Forecast, Mapping[str, float]]
"""A split, an update, and the seconds of a step by part."""


def show_update(found: Forecast, dtype: str, method: str, nic: float, console: Console) -> None:
    """Print what a weight update with `sync.method` moves; in one line for methods other than reshard, which move whole models.

    Args:
        dtype: dtype of what is moved, in words (`kind`).
        nic: see `asyncmoe.plan.traffic.foresee`.
    """
    whole = f"{size(found.model_bytes)} of {dtype}"
    if method != "reshard":
        console.print(f"sync.method={method}: every engine rank receives all {whole} of an update", highlight=False)
        return
    rows = [
        ("bytes on the wire", [size(found.wire)]),
        ("sent by a trainer rank, most", [size(found.sent)]),
        ("received by an engine rank, most", [size(found.received)]),
        (f"expected at {nic:g} GB/s (--nic)", [f"{found.seconds:.3g} s"]),
    ]
    console.print(grid(f"an update of {whole}", [""], rows))
    console.print("The time is for the network alone: the busiest rank's bytes at that speed, in both directions at once.")


def show_switch(found: Mapping[str, Move], console: Console) -> None:
    """Print the moves of a switch from engines to the trainer and back."""
    rows = [(name.replace("_", ", "), [size(move.nbytes), f"{move.seconds:.3g} s"]) for name, move in found.items()]
    rows.append(("in all", ["", f"{sum(move.seconds for move in found.values()):.3g} s"]))
    console.print(grid("a switch, one move after the other", ["bytes", "at least, by data sheets"], rows))


def kind(hf: Hf, dtype: str, adapter: bool) -> str:
    """Return the dtype of an update in words. Engines serve a float8 checkpoint as such, except for embedding, output layer and norms."""
    return dtype if adapter or float8_of(hf) is None else f"float8 and {dtype}"


def show_budget(found: Budget, console: Console) -> None:
    """Print the memory of a run's GPUs and machines, the line that states it in a YAML file, and fixes if the run does not fit."""
    columns = {"trainer": found.trainer, "engine": found.engine}
    for turn, sides in found.phases.items():
        columns[f"both, {turn}"] = GpuMemory({f"of the {name}": one.total for name, one in zip(columns, sides, strict=False)})
    _show_memory(columns, found.gpu_gb, console)
    most = max(found.phases, key=lambda turn: sum(one.total for one in found.phases[turn]), default=None)
    lines = [f"New weights arrive {_arrive('staging' in found.engine.parts)}."] if most is None else [f"Most memory is taken while {most}."]
    for whose, host in (("a trainer", found.host), ("an engine", found.engine.host)):
        lines += [f"# host memory: {nbytes / 1e9:.3g} GB {whose} rank, for what {key} keeps there" for key, nbytes in host.items()]
    lines += [found.line, *map(str, found.refusals)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def show_disk(found: Disk, console: Console) -> None:
    """Print what a run keeps on disk."""
    rows = [
        ("a recorded token", [size(found.token)]),
        ("a recorded step, of the longest conversations", [size(found.step)]),
        (f"steps recorded at the end: {found.steps}", [size(found.steps * found.step)]),
        ("a checkpoint", [size(found.checkpoint)]),
        (f"checkpoints kept: {found.checkpoints}", [size(found.checkpoints * found.checkpoint)]),
    ]
    console.print(grid("disk (log.keep, trainer.keep_checkpoints)", ["at most"], rows))


def _show_memory(columns: Mapping[str, GpuMemory], gpu_gb: float, console: Console) -> None:
    """Print the memory of GPUs in GB, a column each."""
    held = list(columns.values())
    parts = dict.fromkeys(part for memory in held for part in memory.parts)
    rows = [(part, [f"{memory.parts[part] / 1e9:.3g}" if part in memory.parts else "" for memory in held]) for part in parts]
    rows.append(("in all", [f"{memory.total / 1e9:.3g}" for memory in held]))
    rows.append((f"kept free of {gpu_gb:g}", [f"{gpu_gb - memory.total / 1e9:.3g}" for memory in held]))
    room = f"of {usable(gpu_gb) / 1e9:.3g} planned for ({USABLE:.0%} of {gpu_gb:g})"
    rows.append((room, ["fits" if memory.fits(gpu_gb) else "does not fit" for memory in held]))
    console.print(grid("GB each", columns, rows))


def _arrive(staged: bool) -> str:
    return "while engines generate" if staged else "while engines are paused"


def show_splits(found: Sequence[Found], cluster: Cluster, hf: Hf, measured: Path | None, nic: float, console: Console) -> None:
    """Print the suggested splits in a column each, their keys, and the memory of the first split.

    Args:
        measured: file of the measured speeds by which the splits were chosen; None: estimates.
    """
    console.print(side_by_side({split.name: _column(split, update, hf, nic) | _step(parts) for split, update, parts in found}))
    split = found[0][0]
    _show_memory({f"trainer, {split.name}": split.trainer.memory, "engine": split.engine.memory}, cluster.gpu_gb, console)
    source = "an estimate for H100s: replace it by asyncmoe bench step CONFIG --json FILE, and plan with --measured FILE"
    lines = [
        f"Kept free: {1 - USABLE:.0%} of each GPU, and {MARGIN:.0%} of a trainer's activations and working set, unconfirmed by a GPU.",
        f"Tokens per second are {source if measured is None else f'scaled by GPUs from {measured}'}.",
    ]
    for one, _, _ in found:
        lines += [f"Keys, {one.name}:", *yaml_keys(one)]
    if cluster.nodes == 1:
        console.print("\n".join([*lines, *(_faster(found) if len(found) > 1 else ())]), highlight=False, markup=False, soft_wrap=True)
        return
    command = f"asyncmoe simulate --sweep {' '.join(plant_keys(split, cluster, hf, measured))}"
    lines += ["To simulate this model, with multiples of the trainer's least size and several values of max_staleness:", command]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _step(parts: Mapping[str, float]) -> dict[str, str]:
    return {f"seconds of a step of {BATCH * GROUP} responses, {name}": f"{seconds:.3g}" for name, seconds in parts.items()}


def _faster(found: Sequence[Found]) -> list[str]:
    """Say which of two ways to use one machine's GPUs is faster."""
    (least, name), (most, other) = sorted((parts["in all"], split.name) for split, _, parts in found)
    return [
        f"By this estimate a step with {name} takes {least / most:.0%} of the time of {other}. It leaves out that with colocated each step "
        "waits for its longest response, and that with split a step trains what older weights sampled (queue.staleness)."
    ]


def _column(split: Split, update: Forecast, hf: Hf, nic: float) -> dict[str, str]:
    """Return the figures of a split by name."""
    trainer, engine, cluster, count = split.trainer, split.engine, split.cluster, split.engines * split.engine.parallel.world
    trains, serves = (trainer.parallel.world, count) if cluster.machine else (cluster.gpus, cluster.gpus)
    asleep, saved = (moved(trainer.memory), backup(engine.memory)) if cluster.in_turn else (0, 0)
    sizes = ", ".join(f"{key} {size}" for key, size in _trainer(split).items() if key != "ranks")
    return {
        "GPUs of the trainer": str(trainer.parallel.world),
        "GPUs of engines": str(count),
        "trainer": sizes or "tp 1",
        "recompute": "full" if trainer.recompute else "none",
        "optimizer's state in host memory": f"{trainer.offload:.0%}",
        "host memory of a trainer's node": size(trains * (trainer.memory.host[OFFLOAD] + asleep)),
        "host memory of an engine's node": size(serves * (engine.memory.host.get(ROUTES, 0) + saved)),
        "engines": f"{split.engines} x tp {engine.parallel.tp}, ep {engine.parallel.ep}, dp_attention {engine.parallel.attn_dp}",
        "nodes of an engine": str(engine.nodes),
        "new weights arrive": _arrive(engine.serving.staged),
        f"conversations of {cluster.context} tokens at once": str(split.conversations(cluster.context)),
        "tokens/s that the trainer can train": f"{split.trained:,.0f}",
        "tokens/s that engines can generate": f"{split.sampled:,.0f}",
        "memory of a trainer's GPU": size(trainer.memory.total),
        f"an update, of {kind(hf, engine.serving.dtype, cluster.adapter is not None)}": size(update.model_bytes),
        "sent by a trainer rank, most": size(update.sent),
        "received by an engine rank, most": size(update.received),
        f"an update at {nic:g} GB/s": f"{update.seconds:.3g} s",
    }


def _trainer(split: Split) -> dict[str, int]:
    """Return the sizes of the trainer by configuration key, without those at their default."""
    parallel = split.trainer.parallel
    sizes = {"ranks": parallel.world, "tp": parallel.tp, "pp": parallel.pp, "cp": split.trainer.cp, "ep": parallel.ep}
    sizes |= {"first_stage_layers": parallel.first_layers or 1, "last_stage_layers": parallel.last_layers or 1}
    return {key: size for key, size in sizes.items() if size > 1 or key == "ranks"}


def sections(split: Split) -> dict[str, Any]:
    """Return a split as sections of a configuration, without keys at their default, such as `rollout.max_concurrent`, which follows from
    the engines."""
    engine, trainer, adapter, context = split.engine, split.trainer, split.engine.serving.adapter, split.cluster.context
    engines: dict[str, Any] = {"count": split.engines, "tp": engine.parallel.tp, "ep": engine.parallel.ep}
    engines |= {} if split.cluster.machine else {"join": True}
    engines |= {"nodes": engine.nodes} if engine.nodes > 1 and not split.cluster.machine else {}
    engines |= {"dp_attention": engine.parallel.attn_dp} if engine.parallel.attn_dp > 1 else {}
    engines |= {"max_running": engine.serving.running, "max_total_tokens": engine.serving.tokens, "start_timeout_s": 3600}
    if engine.serving.prefill != EngineMemory.prefill:
        engines["args"] = ["--chunked-prefill-size", str(engine.serving.prefill)]
    trains: dict[str, Any] = {**_trainer(split), "tokens_per_microbatch": context, "checkpoint_every": 20}
    trains |= {"recompute": "full" if trainer.recompute else "none", "optimizer": {"distributed": True}}
    if trainer.offload:
        trains["memory"] = {"optimizer_offload": trainer.offload}
    nodes = {"trainer_nodes": split.trainer_nodes, "engine_nodes": split.engine_nodes, "network": "hostname"}
    found = {
        **({"placement": "colocated"} if split.cluster.in_turn else {} if split.cluster.machine else {"cluster": nodes}),
        "environment": {"max_tokens": context, "timeout_s": 3600},
        "rollout": {"groups_per_step": BATCH, "group_size": GROUP, "max_new_tokens": context * 7 // 8, "request_timeout_s": 3600},
        "queue": {"lease_timeout_s": 14400},
        "sync": {"timeout_s": 600},
        "trainer": trains,
        "engines": engines,
    }
    return found if adapter is None else {**found, "train": "lora", "lora": {**asdict(adapter), "targets": list(adapter.targets)}}


def yaml_keys(split: Split) -> list[str]:
    """Return `sections` as lines of YAML."""
    return [
        yaml.safe_dump({name: values}, default_flow_style=True, sort_keys=False, width=inf).strip()[1:-1]
        for name, values in sections(split).items()
    ]


def plant_keys(split: Split, cluster: Cluster, hf: Hf, measured: Path | None) -> list[str]:
    """Return a split and its speeds as arguments of `asyncmoe simulate`."""
    engine, serving, trainer = split.engine, split.engine.serving, split.trainer.parallel
    keys: dict[str, Any] = {"engines.count": split.engines, "engines.gpus": engine.parallel.world, "engines.max_running": serving.running}
    keys |= {"trainer.gpus": trainer.world, "trainer.least_gpus": split.least_nodes * cluster.gpus}
    if measured is None:
        step_s, batch = speeds.decoding(hf, engine.parallel, serving, cluster.context)
        trains_s = BATCH * GROUP * cluster.context / 2 / split.trained
        keys |= {"engines.step_s": f"{step_s:.3g}", "engines.step_batch": f"{batch:.3g}", "trainer.step_s": f"{trains_s:.3g}"}
        # A mean of half the context: E[min(X, c)] = c / 2 for a lognormal X with a median of c / 2.4.
        workload = f"lognormal:median={cluster.context / 2.4:.0f},sigma=1,cap={cluster.context}"
        keys |= {"groups_per_step": BATCH, "group_size": GROUP, "workload": workload}
    return [*([] if measured is None else ["--measured", str(measured)]), *(f"{key}={value}" for key, value in keys.items())]
