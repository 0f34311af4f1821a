"""The `asyncmoe` command. `run` starts all parts of a run on this machine; other commands start single parts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from asyncmoe.bench.commands import bench
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.process import say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="""Train mixture-of-experts language models with asynchronous reinforcement learning.

SGLang engines generate without waiting; Megatron trainers learn from a bounded queue; new weights reach the engines while they
generate. One YAML file describes a run, and any key of it can be changed on the command line:

    asyncmoe run examples/demo.yaml run.steps=100 trainer.optimizer.lr=3e-4

Start with `asyncmoe run examples/demo.yaml`, then open runs/demo/report.html.""",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, e.g. run.steps=100.")]


@app.command()
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Start a whole run on this machine: engines, queue, trainer, live view, report. The same command resumes a stopped run.

    With launch=ray, the run uses the nodes of a Ray cluster.
    """
    from rich.console import Console

    from asyncmoe import config as configuration
    from asyncmoe.launch import local
    from asyncmoe.launch.ray import driver

    loaded = configuration.load(config, overrides or ())
    summary = driver.run(loaded) if loaded.launch == "ray" else local.run(loaded)
    Console().print_json(data=summary)


@app.command()
def rollout(config: ConfigPath, overrides: Overrides = None) -> None:
    """Start only the controller: engines, episodes, scoring and the queue. It waits for a trainer."""
    from asyncmoe import config as configuration
    from asyncmoe.launch import gpus, local
    from asyncmoe.rollout import controller

    loaded = configuration.load(config, overrides or ())
    if config.resolve() != local.resolved(loaded).resolve():  # else the launcher has prepared it
        local.prepare(loaded)
    controller.run(loaded, loaded.run.dir, () if loaded.engines.join else gpus.engine_arguments(loaded))


@app.command()
def engine(
    config: ConfigPath,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="What the run calls it; default: from the host, the SLURM job and --index.")] = None,
    index: Annotated[int, typer.Option(help="Number of this engine among those of this machine: which GPUs it takes.")] = 0,
) -> None:
    """Start an engine that joins a run with engines.join=true, before or during the run. It leaves on Ctrl-C or SIGTERM."""
    from asyncmoe import config as configuration
    from asyncmoe.launch import gpus
    from asyncmoe.rollout.engines import engine_agent

    loaded = configuration.load(config, overrides or ())
    engine_agent.run(loaded, loaded.run.dir, name or engine_agent.default_name(index), index, gpus.engine_arguments(loaded, index))


@app.command("make-model")
def make_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    layers: int = 2,
    hidden: int = 64,
    experts: int = 8,
    experts_per_token: int = 2,
    expert_hidden: int = 64,
    seed: int = 0,
) -> None:
    """Write a tiny, randomly initialized Hugging Face Qwen3-MoE model with a byte-level tokenizer, for complete runs on a laptop."""
    from asyncmoe.config.generation import MadeModel
    from asyncmoe.models import make

    shape = MadeModel(layers=layers, hidden=hidden, experts=experts, experts_per_token=experts_per_token, expert_hidden=expert_hidden)
    make.make_model(out, shape, seed=seed)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory with a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Of a run with train: lora, the adapter alone, as PEFT loads it.")] = False,
    float8: Annotated[bool, typer.Option("--float8", help="Of a model of float8, in float8; else in the trainer's dtype.")] = False,
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face checkpoint; an adapter is merged into the weights."""
    from asyncmoe.launch import export as launcher

    if adapter and float8:
        raise UserError("asyncmoe export", got="--adapter and --float8", expected="one of them; an adapter is not in float8")
    launcher.export(run_dir, out, "adapter" if adapter else "float8" if float8 else "weights")


@app.command()
def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="YAML file of the run to prepare for, and keys to change.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="In place of CONFIG, files with what `srun --output=doctor-%N.json asyncmoe doctor --json` printed."
        ),
    ] = False,
) -> None:
    """Check this machine for problems that would stop or slow down a run, each with a fix; --compare: list differences between nodes."""
    from asyncmoe.doctor import command

    raise typer.Exit(command.run(arguments or (), as_json=as_json, compare=compare))


@app.command()
def plan(
    model: Annotated[
        Path | None, typer.Option(help="config.json of a Hugging Face model, or its directory. No weights are needed.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="Megatron's parallel sizes: tp=4,pp=2,ep=32,dp=32; also etp=, vpp= (model chunks a stage), first= and last= (layers of "
            "the outer stages), and te for its names."
        ),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            help="SGLang engines: 16xtp8ep8 is 16 of tensor parallel 8, experts over 8; 2xtp8ep8dp4pp2 also has data-parallel attention of "
            "4 and 2 pipeline stages."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Instead of --trainer and --engines: suggest a split of so many nodes.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="With --nodes.")] = 8,
    gpu_gb: Annotated[float | None, typer.Option(help="Memory of a GPU; default: 80.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of the longest conversation, and of a micro-batch.")] = 8192,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead: sizes and model of a run's YAML.")] = None,
    nvlink: Annotated[float, typer.Option(help="GB/s a rank sends over NVLink while it receives as much.")] = 450.0,
    nic: Annotated[float, typer.Option(help="GB/s a rank sends over its NIC while it receives as much.")] = 50.0,
    bucket_bytes: Annotated[int, typer.Option(help="Size of a bucket.")] = 1 << 28,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    lora: Annotated[
        str | None,
        typer.Option(help="Move an adapter in place of the weights: rank=32, or rank=32,experts=shared_outer,targets=q_proj+v_proj."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
) -> None:
    """Estimate the memory of every GPU and the cost of a weight transfer from trainer to engines; with --nodes, suggest a cluster split.

    asyncmoe plan --model config.json --nodes 16

    asyncmoe plan --model config.json --trainer tp=4,pp=2,ep=32,dp=32 --engines 16xtp8ep8

    asyncmoe plan --config examples/demo.yaml
    """
    from rich.console import Console

    from asyncmoe.plan import plan_command, render_plan
    from asyncmoe.plan.traffic import Speeds

    speeds = Speeds(nvlink, nic)
    asked = plan_command.PlanArguments(
        model, trainer, engines, nodes, config, gpus_per_node, gpu_gb, context, dtype, bucket_bytes, speeds=speeds, lora=lora
    )
    found = plan_command.run(asked, Console())
    if json_file is not None:
        render_plan.write(found, json_file)


@app.command("simulate")
def simulate_command(
    workload: Annotated[
        str,
        typer.Option(
            help="Response lengths: lognormal, gamma, fixed, math, kimi-k2, moonlight, qwen2-vl, search, tools, with keys, e.g. "
            "lognormal:median=4096,sigma=1,cap=32768,icc=0.3; or a file with one length in tokens a line."
        ),
    ] = "lognormal",
    engines: Annotated[int, typer.Option(help="SGLang servers.")] = 48,
    gpus_per_engine: Annotated[int, typer.Option(help="GPUs of each.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Requests each runs at once.")] = 64,
    step_s: Annotated[float, typer.Option(help="Seconds of a decoding step with nothing in it, t0 in t0 (1 + B / b0).")] = 0.008,
    step_batch: Annotated[float, typer.Option(help="Batch at which a step takes twice as long, b0.")] = 128.0,
    prefill_s: Annotated[float, typer.Option(help="Seconds of a pass over new prompts, in which an engine's other requests wait.")] = 0.0,
    trainer_gpus: Annotated[int, typer.Option(help="GPUs that train.")] = 16,
    groups: Annotated[int, typer.Option(help="Prompts in a training step.")] = 384,
    group_size: Annotated[int, typer.Option(help="Responses to each prompt.")] = 8,
    train_s: Annotated[float, typer.Option(help="Seconds of a training step on the trainer's GPUs.")] = 60.0,
    sync_s: Annotated[float, typer.Option(help="Seconds of a weight update in which the engines go on.")] = 0.0,
    sync_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead: as `asyncmoe plan --json FILE` expects over the NIC, of weights or of an adapter."),
    ] = None,
    pause_s: Annotated[float, typer.Option(help="Seconds of a weight update in which they stand still.")] = 0.0,
    landing: Annotated[str, typer.Option(help="A new version pauses what runs (pause), or waits until it is finished (drain).")] = "pause",
    score_s: Annotated[float, typer.Option(help="Median seconds to score a response.")] = 0.0,
    score_sigma: Annotated[float, typer.Option(help="Standard deviation of the logarithm of that.")] = 0.0,
    score_concurrency: Annotated[int, typer.Option(help="Responses scored at once; 0: all there are.")] = 0,
    eta: Annotated[int, typer.Option(help="Versions a trained token may be behind, in mode async.")] = 4,
    queue_capacity: Annotated[int, typer.Option(help="Trajectories the queue holds; 0: (eta + 1) batches.")] = 0,
    mode: Annotated[str, typer.Option(help="async, one_step_off, sync, or all of them. sync is always there to compare with.")] = "all",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 40,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    score_failure: Annotated[float, typer.Option(help="Share of responses that cannot be scored.")] = 0.0,
    engine_mtbf_s: Annotated[float, typer.Option(help="Mean seconds between failures of an engine; 0: none.")] = 0.0,
    trainer_failure: Annotated[float, typer.Option(help="Share of training steps in which the trainer dies.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Standard deviation of the logarithm of training, sync and pause times.")] = 0.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Split the same GPUs in several ways, with each of --etas.")] = False,
    etas: Annotated[str, typer.Option(help="For --sweep.")] = "1,2,4,8",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw them: a .svg or .png.")] = None,
) -> None:
    """Simulate the speed of a run on a cluster in each mode: engines, queue, scoring, trainer and weight sync, event by event.

    It starts no process and needs no GPU. The same rules as in `asyncmoe run` decide which groups may start and which may still be trained
    on. First measure three things on a few GPUs: the step time of an engine at two batch sizes (--step-s, --step-batch), the seconds of a
    training step (--train-s), and some response lengths (--workload FILE). Then, for the whole cluster,

        asyncmoe simulate --engines 768 --gpus-per-engine 8 --trainer-gpus 2048 --groups 1024 --group-size 16 --train-s 90 --sweep

    reports how many of the 8192 GPUs should generate, which eta is worthwhile, and the speed-up over synchronous training.
    """
    from rich.console import Console

    from asyncmoe.simulate import command, show
    from asyncmoe.simulate.plant import Hazards, Plant
    from asyncmoe.simulate.workload import parse

    show.check_plot(plot)
    sync_s = command.sync_seconds(sync_s, sync_plan)
    plant = Plant(
        engines=engines,
        gpus_per_engine=gpus_per_engine,
        concurrency=concurrency,
        step_s=step_s,
        step_batch=step_batch,
        prefill_s=prefill_s,
        trainer_gpus=trainer_gpus,
        groups=groups,
        group_size=group_size,
        train_s=train_s,
        sync_s=sync_s,
        pause_s=pause_s,
        landing=command.landing(landing),
        score_s=score_s,
        score_sigma=score_sigma,
        score_concurrency=score_concurrency,
        eta=eta,
        queue_capacity=queue_capacity,
        steps=steps,
        seed=seed,
        hazards=Hazards(score_failure=score_failure, engine_mtbf_s=engine_mtbf_s, trainer_failure=trainer_failure, jitter=jitter),
    )
    found = command.run(plant, parse(workload), mode, command.etas(etas) if sweep else ())
    if json_file is not None:
        show.write(found, json_file)
    if plot is not None:
        show.plot(found, plot)
    show.table(found, Console())


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """Write summary.json and report.html of a run (also while it runs)."""
    from asyncmoe.telemetry.report import report as write_report
    from asyncmoe.telemetry.summary import write_summary

    write_summary(run_dir)
    typer.echo(write_report(run_dir))


app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command. An `AsyncmoeError` prints as one line; any other exception keeps its traceback."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    sys.path.insert(0, "")  # as with `python -m`: finds the user's scorers and environments in the current directory
    try:
        app()
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)
