"""Print and write the results of `asyncmoe plan`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from asyncmoe.errors import DataError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.plan.memory import USABLE, EngineMemory, GpuMemory, usable
from asyncmoe.plan.sizes import ENGINE, TRAINER, engines_text, trainer_text
from asyncmoe.plan.split import Cluster, Split
from asyncmoe.plan.traffic import Forecast
from asyncmoe.storage import size


def show(found: Forecast, console: Console, cp: int) -> None:
    """Print a forecast as a table.

    Args:
        cp: context-parallel ranks, which the forecast counts as data-parallel ones.
    """
    console.print(_title(found, cp), highlight=False)
    grid = _grid("", [""])
    for line in _lines(found):
        grid.add_row(*line)
    console.print(grid)
    console.print("Times are those of the wire alone: the busiest rank's bytes at that speed, in both directions at once.")


def show_whole(found: Forecast, method: str, console: Console) -> None:
    """Print what an update of a method that moves the whole model, not shards, carries: `broadcast` or `disk`."""
    whole = size(found.model_bytes)
    moved = {
        "broadcast": f"sends all {whole} to every engine rank",
        "disk": f"writes {whole} to sync.directory; every engine reads all of it",
    }
    console.print(f"{found.model}: {whole} of {found.dtype}\nsync.method={method}: an update {moved[method]}", highlight=False)


def _grid(first: str, columns: Iterable[str]) -> Grid:
    grid = Grid(show_edge=False)
    grid.add_column(first)
    for name in columns:
        grid.add_column(name, justify="right")
    return grid


def _title(found: Forecast, cp: int) -> str:
    sizes = {**vars(found.trainer), "dp": found.trainer.dp // cp}
    trainer = _sizes(sizes, MegatronParallel(), {name: field for field, name in TRAINER.items()}, ("tp", "pp", "ep", "etp", "dp"))
    trainer += f", cp {cp}" if cp > 1 else ""
    engine = _sizes(vars(found.engine), EngineParallel(), {name: name for name in ENGINE}, ("tp", "ep"))
    return (
        f"{found.model}: {size(found.model_bytes)} of {found.dtype}{_adapter(found.adapter)}\n"
        f"trainer {found.trainer_ranks} ranks ({trainer}) -> {found.engines} engines, {found.engine_ranks} ranks ({engine} each)\n"
        f"lower bound {size(found.lower_bound)}"
    )


def _adapter(kind: Kind | None) -> str:
    return "" if kind is None else f", an adapter of rank {kind.rank} ({kind.experts}: {', '.join(kind.targets)})"


def _sizes(sizes: Mapping[str, Any], plain: object, called: Mapping[str, str], always: Sequence[str]) -> str:
    """Return a grid's sizes under the names in `called`; sizes outside `always` appear only if they differ from the default."""
    shown = [field for field in called if field in always or sizes[field] != getattr(plain, field)]
    return ", ".join(f"{called[field]} {sizes[field]}" for field in shown)


def _lines(found: Forecast) -> list[tuple[str, str]]:
    way = found.way
    return [
        ("bytes on the wire", size(way.bytes_wire)),
        ("over the lower bound", f"{way.ratio:.3f}"),
        ("sent by a trainer rank, mean", size(way.sent.mean)),
        ("sent by a trainer rank, most", size(way.sent.most)),
        ("imbalance of the trainer ranks", f"{way.imbalance:.3f}"),
        ("received by an engine rank, most", size(way.received.most)),
        (f"buckets of {size(found.bucket_bytes)} of the busiest rank", str(way.buckets)),
        ("messages of the busiest rank", str(way.messages)),
        ("plan time per rank", f"{way.plan_seconds:.2f} s"),
        (f"expected at {found.speeds.nic:g} GB/s (NIC)", f"{way.nic_seconds:.3g} s"),
        (f"expected at {found.speeds.nvlink:g} GB/s (NVLink)", f"{way.nvlink_seconds:.3g} s"),
    ]


def show_memory(columns: Mapping[str, GpuMemory], gpu_gb: float, console: Console) -> None:
    """Print the memory of GPUs in GB, a column each."""
    grid = _grid("GB each", columns)
    for part in dict.fromkeys(part for memory in columns.values() for part in memory.parts):
        grid.add_row(part, *(f"{memory.parts[part] / 1e9:.3g}" if part in memory.parts else "" for memory in columns.values()))
    grid.add_row("in all", *(f"{memory.total / 1e9:.3g}" for memory in columns.values()))
    room = f"of {usable(gpu_gb) / 1e9:.3g} planned for ({USABLE:.0%} of {gpu_gb:g})"
    grid.add_row(room, *("fits" if memory.fits(gpu_gb) else "does not fit" for memory in columns.values()))
    console.print(grid)


def show_updates(found: Forecast, staged: bool, console: Console) -> None:
    """Print what updates take, a column each.

    Args:
        staged: engines have room to stage a whole version.
    """
    if not found.updates:
        return
    sent = ["everything" if one.changed is None else f"{one.changed:.0%}, as a delta" for one in found.updates]
    grid = _grid("an update of which there is sent", sent)
    grid.add_row("bytes on the wire", *(size(one.bytes_wire) for one in found.updates))
    grid.add_row("received by an engine rank, most", *(size(one.received) for one in found.updates))
    grid.add_row(f"expected at {found.speeds.nic:g} GB/s (NIC)", *(f"{one.seconds:.3g} s" for one in found.updates))
    grid.add_row("engines pause", *(f"{one.pause if staged else one.pause_in_place:.3g} s" for one in found.updates))
    console.print(grid)
    console.print("Deltas are for changes at random places. Between GPUs they have not been measured.", highlight=False)


def show_room(tokens: int, staged: bool, context: int, console: Console) -> None:
    """Print the tokens of KV cache that an engine has room for, and how new weights arrive beside them.

    Args:
        context: tokens of the longest conversation.
    """
    fits = (
        f"new weights arrive {_arrive(staged)}"
        if tokens >= context
        else f"too few for a conversation of {context} tokens: such an engine does not fit"
    )
    console.print(
        f"Micro-batches of {context} tokens; the optimizer's state is sharded. An engine's KV cache fills the rest of its GPUs, "
        f"{tokens} tokens; {fits}.",
        highlight=False,
    )


def _arrive(staged: bool) -> str:
    return "while engines generate" if staged else "while engines are paused"


def show_splits(found: Sequence[tuple[Split, Forecast]], cluster: Cluster, console: Console) -> None:
    """Print the suggested splits, a column each, and the memory of the first."""
    grid = _grid("", [f"split {number + 1}" for number in range(len(found))])
    for label, values in _split_lines(found, cluster):
        grid.add_row(label, *values)
    console.print(grid)
    split = found[0][0]
    show_memory({"trainer of split 1": split.trainer.memory, "engine of split 1": split.engine.memory}, cluster.gpu_gb, console)
    console.print("Keys of split 1:\n" + "\n".join(yaml_keys(split)), highlight=False, markup=False, soft_wrap=True)
    command = f"asyncmoe simulate --sweep {' '.join(plant_keys(split))}"
    hint = "Split 1 gives the trainer as few nodes as its memory needs. For the fastest split, add measured speeds (docs/simulate.md) to:"
    console.print(f"{hint}\n{command}", highlight=False, markup=False, soft_wrap=True)


def _split_lines(found: Sequence[tuple[Split, Forecast]], cluster: Cluster) -> list[tuple[str, list[str]]]:
    splits, forecasts = [split for split, _ in found], [forecast for _, forecast in found]
    ways = [forecast.way for forecast in forecasts]
    return [
        ("nodes of the trainer", [str(split.trainer_nodes) for split in splits]),
        ("nodes of engines", [str(split.engine_nodes) for split in splits]),
        ("trainer", [trainer_text(split.trainer.parallel, split.trainer.cp) for split in splits]),
        ("recompute", ["full" if split.trainer.recompute else "none" for split in splits]),
        ("engines", [engines_text(split.engines, split.engine.parallel) for split in splits]),
        ("nodes of an engine", [str(split.engine.nodes) for split in splits]),
        ("new weights arrive", [_arrive(split.engine.serving.staged) for split in splits]),
        (f"conversations of {cluster.context} at once", [str(split.conversations(cluster.context)) for split in splits]),
        ("memory of a trainer's GPU", [size(split.trainer.memory.total) for split in splits]),
        ("memory of an engine's GPU", [size(split.engine.memory.total) for split in splits]),
        ("sent by a trainer rank, most", [size(way.sent.most) for way in ways]),
        ("received by an engine rank, most", [size(way.received.most) for way in ways]),
        (f"a sync at {forecasts[0].speeds.nic:g} GB/s (NIC)", [f"{way.nic_seconds:.3g} s" for way in ways]),
    ]


def yaml_keys(split: Split) -> list[str]:
    """Return a split as configuration keys, without those at their default."""
    parallel, engine = split.trainer.parallel, split.engine
    sizes = {"ranks": parallel.world, "tp": parallel.tp, "pp": parallel.pp, "cp": split.trainer.cp, "ep": parallel.ep}
    sizes |= {"first_stage_layers": parallel.first_layers or 1, "last_stage_layers": parallel.last_layers or 1}
    trainer = [f"{key}: {size}" for key, size in sizes.items() if size > 1 or key == "ranks"]
    trainer += [f"tokens_per_microbatch: {split.trainer.rows}", *(["recompute: full"] if split.trainer.recompute else [])]
    engines = [f"count: {split.engines}", "join: true", f"tp: {engine.parallel.tp}", f"ep: {engine.parallel.ep}"]
    engines += [f"nodes: {engine.nodes}"] if engine.nodes > 1 else []
    engines += [f"max_running: {engine.serving.running}", f"max_total_tokens: {engine.serving.tokens}"]
    if engine.serving.prefill != EngineMemory.prefill:
        engines.append(f'args: ["--chunked-prefill-size", "{engine.serving.prefill}"]')
    return [
        f"cluster: {{trainer_nodes: {split.trainer_nodes}, engine_nodes: {split.engine_nodes}, network: hostname}}",
        f"trainer: {{{', '.join(trainer)}, optimizer: {{distributed: true}}}}",
        f"engines: {{{', '.join(engines)}}}",
        *([] if engine.serving.adapter is None else ["train: lora"]),
    ]


def plant_keys(split: Split) -> list[str]:
    """Return the sizes of a split as keys of a plant for `asyncmoe simulate`."""
    engines, serving = split.engine.parallel, split.engine.serving
    sizes = {"engines.count": split.engines, "engines.gpus": engines.world, "engines.max_running": serving.running}
    return [f"{key}={size}" for key, size in {**sizes, "trainer.gpus": split.trainer.parallel.world}.items()]


def write(values: Mapping[str, Any], file: Path) -> None:
    """Write the results as JSON.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        file.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise DataError(str(file), got=error.strerror, expected="a file that can be written") from error
