"""Print and write the results of `asyncmoe plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from asyncmoe.plan.budget import Budget
from asyncmoe.plan.memory import USABLE, EngineMemory, GpuMemory, usable
from asyncmoe.plan.split import Cluster, Split
from asyncmoe.plan.traffic import Forecast
from asyncmoe.storage import size
from asyncmoe.tables import grid


def show_update(found: Forecast, method: str, nic: float, console: Console) -> None:
    """Print what a weight update moves by `sync.method`; for a method other than reshard, which moves whole models, in one line.

    Args:
        nic: see `asyncmoe.plan.traffic.foresee`.
    """
    whole = size(found.model_bytes)
    if method != "reshard":
        moved = {
            "broadcast": f"sends all {whole} to every engine rank",
            "disk": f"writes {whole} to sync.directory; every engine reads all of it",
        }
        console.print(f"sync.method={method}: an update {moved[method]}", highlight=False)
        return
    rows = [
        ("bytes on the wire", [size(found.wire)]),
        ("sent by a trainer rank, most", [size(found.sent)]),
        ("received by an engine rank, most", [size(found.received)]),
        (f"expected at {nic:g} GB/s (--nic)", [f"{found.seconds:.3g} s"]),
    ]
    console.print(grid(f"an update of {whole}", [""], rows))
    console.print("The time is that of the wire alone: the busiest rank's bytes at that speed, in both directions at once.")


def show_budget(found: Budget, console: Console) -> None:
    """Print the memory of a run's GPUs and machines, the line that states it in a YAML, and fixes if it does not fit."""
    columns = {"trainer": found.trainer, "engine": found.engine}
    if found.shared:
        columns["both on a GPU"] = GpuMemory({f"the {name}": one.total for name, one in columns.items()})
    _show_memory(columns, found.gpu_gb, console)
    lines = [f"New weights arrive {_arrive('staging' in found.engine.parts)}.", found.line]
    for key, nbytes in found.host.items():
        lines.append(f"# host memory: {nbytes / 1e9:.3g} GB a trainer rank, for the copy that {key} keeps")
    lines += [str(refusal) for refusal in found.refusals]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _show_memory(columns: Mapping[str, GpuMemory], gpu_gb: float, console: Console) -> None:
    """Print the memory of GPUs in GB, a column each."""
    held = list(columns.values())
    parts = dict.fromkeys(part for memory in held for part in memory.parts)
    rows = [(part, [f"{memory.parts[part] / 1e9:.3g}" if part in memory.parts else "" for memory in held]) for part in parts]
    rows.append(("in all", [f"{memory.total / 1e9:.3g}" for memory in held]))
    room = f"of {usable(gpu_gb) / 1e9:.3g} planned for ({USABLE:.0%} of {gpu_gb:g})"
    rows.append((room, ["fits" if memory.fits(gpu_gb) else "does not fit" for memory in held]))
    console.print(grid("GB each", columns, rows))


def _arrive(staged: bool) -> str:
    return "while engines generate" if staged else "while engines are paused"


def show_splits(found: Sequence[tuple[Split, Forecast]], cluster: Cluster, nic: float, console: Console) -> None:
    """Print the suggested splits, a column each, and the memory of the first."""
    console.print(grid("", [f"split {number + 1}" for number in range(len(found))], _split_lines(found, cluster, nic)))
    split = found[0][0]
    _show_memory({"trainer of split 1": split.trainer.memory, "engine of split 1": split.engine.memory}, cluster.gpu_gb, console)
    console.print("Keys of split 1:\n" + "\n".join(yaml_keys(split)), highlight=False, markup=False, soft_wrap=True)
    command = f"asyncmoe simulate --sweep {' '.join(plant_keys(split))}"
    hint = "Split 1 gives the trainer as few nodes as its memory needs. For the fastest split, add measured speeds (docs/simulate.md) to:"
    console.print(f"{hint}\n{command}", highlight=False, markup=False, soft_wrap=True)


def _split_lines(found: Sequence[tuple[Split, Forecast]], cluster: Cluster, nic: float) -> list[tuple[str, list[str]]]:
    splits, updates = [split for split, _ in found], [forecast for _, forecast in found]
    trainers = [{key: size for key, size in _trainer(split).items() if key != "ranks"} for split in splits]
    engines = [split.engine.parallel for split in splits]
    return [
        ("nodes of the trainer", [str(split.trainer_nodes) for split in splits]),
        ("nodes of engines", [str(split.engine_nodes) for split in splits]),
        ("trainer", [", ".join(f"{key} {size}" for key, size in sizes.items()) or "tp 1" for sizes in trainers]),
        ("recompute", ["full" if split.trainer.recompute else "none" for split in splits]),
        ("engines", [f"{split.engines} x tp {one.tp}, ep {one.ep}" for split, one in zip(splits, engines, strict=True)]),
        ("nodes of an engine", [str(split.engine.nodes) for split in splits]),
        ("new weights arrive", [_arrive(split.engine.serving.staged) for split in splits]),
        (f"conversations of {cluster.context} at once", [str(split.conversations(cluster.context)) for split in splits]),
        ("memory of a trainer's GPU", [size(split.trainer.memory.total) for split in splits]),
        ("memory of an engine's GPU", [size(split.engine.memory.total) for split in splits]),
        ("sent by a trainer rank, most", [size(one.sent) for one in updates]),
        ("received by an engine rank, most", [size(one.received) for one in updates]),
        (f"an update at {nic:g} GB/s (--nic)", [f"{one.seconds:.3g} s" for one in updates]),
    ]


def _trainer(split: Split) -> dict[str, int]:
    """Return the sizes of the trainer by configuration key, without those at their default."""
    parallel = split.trainer.parallel
    sizes = {"ranks": parallel.world, "tp": parallel.tp, "pp": parallel.pp, "cp": split.trainer.cp, "ep": parallel.ep}
    sizes |= {"first_stage_layers": parallel.first_layers or 1, "last_stage_layers": parallel.last_layers or 1}
    return {key: size for key, size in sizes.items() if size > 1 or key == "ranks"}


def yaml_keys(split: Split) -> list[str]:
    """Return a split as configuration keys, without those at their default."""
    engine = split.engine
    trainer = [f"{key}: {size}" for key, size in _trainer(split).items()]
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
