"""Commands that examine a machine, a cluster or a plan before a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from asyncmoe.config_commands import ConfigPath, Overrides

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
_Measured = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Speeds from asyncmoe bench step CONFIG --json FILE, scaled to this cluster.")
]
_JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file, as JSON.")]


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="YAML file of the planned run, and keys to override. Without a file, only the machine is checked.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Check this machine for what would stop or slow down a run.

    Every finding comes with its fix.
    """
    from asyncmoe.doctor import examination

    raise typer.Exit(examination.report(arguments or (), as_json=as_json))


def plan(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of --config to override, as for asyncmoe run.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file of the run to plan.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="config.json of a Hugging Face model, or its directory; with --config, it replaces model.path. Weights are not read."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=1 << 10, help="Suggest how trainer and engines share this many nodes, or one node's GPUs.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=1 << 7, help="With --nodes: GPUs per node.")] = 8,
    context: Annotated[int, typer.Option(help="With --nodes: tokens of the longest conversation and of a micro-batch.", min=1)] = 8192,
    lora: Annotated[
        str | None,
        typer.Option(help="With --nodes: train an adapter, given as rank=32 or rank=32,experts=shared_outer,targets=q_proj+v_proj."),
    ] = None,
    family: Annotated[str, typer.Option(help="With --nodes: model family of your own, as package.module:name.")] = "auto",
    gpu_gb: Annotated[float | None, typer.Option(min=1e-3, max=1e6, help="Memory of a GPU in GB; default: 80.")] = None,
    nic: Annotated[
        float, typer.Option(min=1e-3, max=1e6, help="GB/s that each rank can send and receive at the same time; over NVLink 450.")
    ] = 50.0,
    measured: _Measured = None,
    json_file: _JsonFile = None,
) -> None:
    """Estimate GPU memory and weight sync, or split a cluster.

    --config estimates the memory of every GPU of a run, and the switches of a colocated one; --nodes suggests a split. For example:

    asyncmoe plan --config examples/demo.yaml trainer.recompute=full

    asyncmoe plan --config examples/cluster/qwen3-30b-a3b.yaml --model config.json trainer.tp=2 --gpu-gb 141

    asyncmoe plan --model config.json --nodes 16 --measured speeds.json
    """
    from asyncmoe import tables
    from asyncmoe.errors import ConfigError
    from asyncmoe.plan import plan_command
    from asyncmoe.plan.split import Cluster

    if (config is None) == (nodes is None):
        raise ConfigError("asyncmoe plan", got="neither" if config is None else "both", expected="one of --config FILE and --nodes")
    console = tables.console()
    if config is not None:
        found = plan_command.of_run(config, overrides or (), model, gpu_gb, nic, console)
    elif model is None or overrides:
        got = "no --model" if model is None else " ".join(overrides or ())
        raise ConfigError("asyncmoe plan --nodes", got=got, expected="--model, and no KEY=VALUE, which only --config uses")
    else:
        cluster = Cluster(nodes or 0, gpus_per_node, gpu_gb or plan_command.GPU_GB, context)
        found = plan_command.of_cluster(cluster, model, family, lora, measured, nic, console)
    if json_file is not None:
        tables.write_json(found, json_file)


def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLANT] [KEY=VALUE]...",
            help="YAML file that describes cluster and run, and keys to override. docs/simulate.md lists the keys and their defaults.",
        ),
    ] = None,
    swept: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Try several splits of the same GPUs between engines and trainer, each with max_staleness 1, 2, 4, 8 and the plant's.",
        ),
    ] = False,
    measured: _Measured = None,
    json_file: _JsonFile = None,
) -> None:
    """Predict the speed of a run on a cluster.

    Engines, queue, scoring, trainer and weight sync are simulated as events.
    Groups are admitted and dropped by the same rules as in `asyncmoe run`.
    Measure on a few GPUs with asyncmoe bench step and pass --measured FILE, or write these into a copy of examples/plant.yaml:

    - the step time of an engine at two batch sizes: engines.step_s, engines.step_batch

    - the seconds of a training step: trainer.step_s

    - some response lengths: workload=RUN_DIR

    Then describe the whole cluster and find its best split:

        asyncmoe simulate examples/plant.yaml engines.count=96 trainer.gpus=32 --sweep

    The sweep reports the best split and max_staleness, and the speed-up over mode sync.
    """
    from asyncmoe import tables
    from asyncmoe.plan import speeds
    from asyncmoe.simulate import show
    from asyncmoe.simulate.compare import Comparison, compare
    from asyncmoe.simulate.plant import read_plant
    from asyncmoe.simulate.sweep import Sweep, sweep
    from asyncmoe.simulate.workload import parse

    plant = read_plant(arguments or ())
    if measured is not None:
        plant = plant.at_speeds(speeds.read(measured))
    drawn = parse(plant.workload)
    found: Comparison | Sweep = sweep(plant, drawn) if swept else compare(plant, drawn)
    if json_file is not None:
        tables.write_json(asdict(found), json_file)
    show.table(found, tables.console())


@bench.command()
def step(
    config: ConfigPath,
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=60.0, help="Minutes to measure, from the second step on.")] = 2.0,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="File for the figures.")] = Path("speeds.json"),
) -> None:
    """Measure a configuration of your own: seconds of a training step, tokens per second of trainer and engines, and which of them waits.

    CONFIG runs on this machine without warm-up, evaluation, checkpoints and loggers, in a temporary directory. A few GPUs suffice, because
    `asyncmoe plan` and `asyncmoe simulate` scale the figures to a cluster (`--measured FILE`). For example:

        asyncmoe bench step examples/cluster/qwen3-30b-a3b.yaml trainer.ranks=4 trainer.pp=1 engines.count=1
    """
    from asyncmoe import tables
    from asyncmoe.launch.measure import measure

    tables.write_json(measure(config, overrides or (), minutes), json_file)
    typer.echo(f"next: asyncmoe plan --measured {json_file} --nodes 8 --model CONFIG.JSON")
    typer.echo(f"      asyncmoe simulate --measured {json_file} --sweep")
