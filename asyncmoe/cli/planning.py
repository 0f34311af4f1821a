"""Commands that look at a machine, a cluster or a plan before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="YAML file of the planned run, and keys to override. Without it only the machine is checked.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Compare nodes: give output files of `srun --output=doctor-%N.json asyncmoe doctor --json` instead of CONFIG."
        ),
    ] = False,
) -> None:
    """Check what on this machine would stop a run or slow it down, with a fix on each line. --compare lists differences between nodes."""
    from asyncmoe.doctor import command
    from asyncmoe.errors import ConfigError

    if as_json and compare:
        raise ConfigError("asyncmoe doctor --compare", got="--json", expected="no other option", hint="leave --json out")
    words = arguments or ()
    raise typer.Exit(command.compared([Path(word) for word in words]) if compare else command.check(words, as_json=as_json))


def plan(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of --config to override, as for asyncmoe run.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="config.json of a Hugging Face model, or its directory. Weights are not needed.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="Parallel sizes of the trainer: tp=4,pp=2,ep=32,dp=32; also cp= (ranks that share a sequence), etp=, vpp= (model chunks "
            "per stage), first= and last= (layers of the first and last stage), and te for Transformer Engine's parameter names."
        ),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            help="Engines: 16xtp8ep8 means 16 engines with 8 tensor-parallel and 8 expert-parallel ranks; 2xtp8ep8dp4pp2 adds "
            "data-parallel attention over 4 and 2 pipeline stages."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Suggest how to split this many nodes, instead of --trainer and --engines.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node, for --nodes.")] = 8,
    gpu_gb: Annotated[float | None, typer.Option(help="Memory of a GPU in GB; default: 80.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of the longest conversation and of a micro-batch.", min=1)] = 8192,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Take sizes and model from the YAML file of a run instead.")] = None,
    nvlink: Annotated[float, typer.Option(help="GB/s that a rank sends over NVLink while receiving as much.")] = 450.0,
    nic: Annotated[float, typer.Option(help="GB/s that a rank sends over its NIC while receiving as much.")] = 50.0,
    hbm: Annotated[float, typer.Option(help="GB/s that a GPU reads or writes in its own memory.")] = 3000.0,
    bucket_bytes: Annotated[int, typer.Option(help="Bucket size in bytes (sync.bucket_bytes).", min=1)] = 1 << 28,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bfloat16",
    lora: Annotated[
        str | None,
        typer.Option(
            help="Train and move an adapter instead of the weights: rank=32, or rank=32,experts=shared_outer,targets=q_proj+v_proj."
        ),
    ] = None,
    family: Annotated[str, typer.Option(help="Model family of your own, package.module:name, as model.family.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file, as JSON.")] = None,
) -> None:
    """Estimate the memory of every GPU and the cost of moving weights from trainer to engines; --nodes suggests a split of a cluster.

    asyncmoe plan --model config.json --nodes 16

    asyncmoe plan --model config.json --trainer tp=4,pp=2,ep=32,dp=32 --engines 16xtp8ep8

    asyncmoe plan --model config.json --trainer tp=4,pp=2,ep=32,dp=32 --gpu-gb 141

    asyncmoe plan --config examples/demo.yaml trainer.recompute=full
    """
    from asyncmoe import tables
    from asyncmoe.plan import plan_command, render_plan
    from asyncmoe.plan.traffic import Speeds

    sizes = (gpus_per_node, gpu_gb, context, dtype, bucket_bytes, Speeds(nvlink, nic, hbm), lora, family)
    asked = plan_command.PlanArguments(model, trainer, engines, nodes, config, tuple(overrides or ()), *sizes)
    found = plan_command.run(asked, tables.console())
    if json_file is not None:
        render_plan.write(found, json_file)


def simulate_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLANT] [KEY=VALUE]...",
            help="YAML file that describes cluster and run, and keys to override. docs/simulate.md lists the keys and their defaults.",
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Take lengths, sizes and seconds from a run's records.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try several splits of the same GPUs between engines and trainer, each with --staleness.")
    ] = False,
    staleness: Annotated[
        str | None, typer.Option(metavar="LIST", help="Values of max_staleness that --sweep tries; default: 1,2,4,8.")
    ] = None,
    mode: Annotated[str, typer.Option(help="async, one_step_off, sync, or all. sync is always simulated, as the baseline.")] = "all",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file, as JSON.")] = None,
) -> None:
    """Predict the speed of a run on a cluster, by simulating engines, queue, scoring, trainer and weight sync as events.

    The simulation starts no process and needs no GPU. It admits and drops
    groups by the same rules as `asyncmoe run`. Measure three things on a few
    GPUs and write them into a copy of examples/plant.yaml:

    - the step time of an engine at two batch sizes: engines.step_s, engines.step_batch

    - the seconds of a training step: trainer.step_s

    - some response lengths, one per line in a file: workload (or --trace)

    Then describe the whole cluster and find its best split:

        asyncmoe simulate examples/plant.yaml engines.count=96 trainer.gpus=32 --sweep

    It reports the best split, max_staleness, and speed-up over synchronous.
    """
    from asyncmoe import tables
    from asyncmoe.simulate import cautions, command, show
    from asyncmoe.simulate.recorded import read_recorded

    bounds = command.staleness_bounds(staleness, sweep)
    words = arguments or ()
    recorded = None if trace is None else read_recorded(trace)
    plant = command.read_plant(words, recorded)
    known = () if recorded is None else cautions.of_trace(recorded, plant, [word.partition("=")[0] for word in words])
    found = command.run(plant, mode, bounds, known)
    if json_file is not None:
        show.write(found, json_file)
    show.table(found, tables.console())
