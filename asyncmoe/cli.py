"""The `asyncmoe` command: every part of a run can be started by itself, and `run` starts all of them on this machine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncmoe.errors import AsyncmoeError
from asyncmoe.process import ERROR_PREFIX

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
    """Everything on this machine: engines, queue, trainer, live view, report. The same command resumes a stopped run."""
    from rich.console import Console

    from asyncmoe.launch import local

    summary = local.run(config, overrides or ())
    Console().print_json(data=summary)


@app.command()
def rollout(config: ConfigPath, overrides: Overrides = None) -> None:
    """The controller alone: engines, episodes, scoring and the queue; waits for a trainer."""
    from asyncmoe import config as configuration
    from asyncmoe.rollout import controller

    loaded = configuration.load(config, overrides or ())
    controller.run(loaded, loaded.run.dir)


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
    """Write a tiny random Hugging Face Qwen3-MoE with a byte-level tokenizer: enough to run everything on a laptop."""
    from asyncmoe.config.generation import MadeModel
    from asyncmoe.models import make

    shape = MadeModel(layers=layers, hidden=hidden, experts=experts, experts_per_token=experts_per_token, expert_hidden=expert_hidden)
    make.make_model(out, shape, seed=seed)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory with a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face checkpoint."""
    from asyncmoe.launch import export as launcher

    launcher.export(run_dir, out)


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="config.json of a Hugging Face model, or its directory. No weights are needed.")],
    trainer: Annotated[
        str,
        typer.Option(
            help="Megatron's parallel sizes: tp=4,pp=2,ep=32,dp=32; also etp=, vpp= (model chunks a stage), first= and last= (layers of "
            "the outer stages), and te for its names."
        ),
    ],
    engines: Annotated[
        str,
        typer.Option(
            help="SGLang engines: 16xtp8ep8 is 16 of tensor parallel 8, experts over 8; 2xtp8ep8dp4pp2 also has data-parallel attention of "
            "4 and 2 pipeline stages."
        ),
    ],
    nvlink: Annotated[float, typer.Option(help="GB/s a rank sends over NVLink while it receives as much.")] = 450.0,
    nic: Annotated[float, typer.Option(help="GB/s a rank sends over its NIC while it receives as much.")] = 50.0,
    bucket_bytes: Annotated[int, typer.Option(help="Size of a bucket.")] = 1 << 28,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
) -> None:
    """What moving a model's weights from a trainer to its engines takes: bytes per rank, balance, buckets, time."""
    from rich.console import Console

    from asyncmoe.launch import planning

    speeds = planning.Speeds(nvlink, nic)
    found = planning.forecast(model, trainer, engines, dtype=dtype, bucket_bytes=bucket_bytes, speeds=speeds)
    if json_file is not None:
        planning.write(found, json_file)
    planning.show(found, Console())


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """Write summary.json and report.html of a run (also while it runs)."""
    from asyncmoe.telemetry.report import report as write_report
    from asyncmoe.telemetry.summary import write_summary

    write_summary(run_dir)
    typer.echo(write_report(run_dir))


bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.add_typer(bench, name="bench")


@bench.command("reshard")
def bench_reshard(
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there too.")] = None,
) -> None:
    """Weights from four trainer ranks to two engine ranks, in real processes: shard to shard against gather-and-broadcast."""
    from asyncmoe.bench import reshard

    _show(reshard.run(), json_path)


@bench.command("sync")
def bench_sync(
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there too.")] = None,
    updates: Annotated[int, typer.Option(help="Weight updates of each case.", min=3)] = 30,
) -> None:
    """Weight updates of a real engine while it generates: how long it stands still, and how fast it is while it stages."""
    from asyncmoe.bench import sync

    _show(sync.run(updates), json_path)


@bench.command("gpu")
def bench_gpu(
    scale: Annotated[float, typer.Option(metavar="X", min=0.01, max=1.0, help="Share of the model's layers.")] = 1.0,
    bucket_mib: Annotated[int, typer.Option(metavar="MIB", min=1, help="Messages of all lanes of a rank together.")] = 512,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where to write the results.")] = None,
) -> None:
    """Pack and unpack of a shard of Qwen3-30B-A3B's shape on this machine's first GPU, next to plain device-to-device copies."""
    from asyncmoe.bench import gpu

    results = gpu.run(scale, bucket_mib << 20)
    _show(results, json_path or gpu.results_path(results))


@bench.command("routes")
def bench_routes(
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there too.")] = None,
    tokens: Annotated[int, typer.Option(help="Of the trajectory.", min=1)] = 8192,
) -> None:
    """Expert routes of Qwen3-30B-A3B's shape: bit-packed against base64 in JSON; what recording costs an engine and replay a trainer."""
    from asyncmoe.bench import routes

    results = routes.everything(tokens)
    _show(results, json_path)
    typer.echo(routes.table(results))


def _show(results: dict[str, Any], path: Path | None) -> None:
    """Print results, and write them where they are wanted."""
    import json

    from rich.console import Console

    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
    Console().print_json(data=results)


def main() -> None:
    """Run the command; errors meant for the user are one line, everything else keeps its traceback."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    try:
        app()
    except AsyncmoeError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
