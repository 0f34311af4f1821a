"""The commands of `asyncmoe bench`. Each imports its dependencies when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncmoe.cli.planning import bench
from asyncmoe.errors import UserError

Results = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there too.")]


@bench.callback()
def prepare() -> None:
    """Let child processes import this package from any working directory."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


@bench.command("reshard")
def reshard_(json_path: Results = None) -> None:
    """Weights from four trainer ranks to two engine ranks, in real processes: shard to shard against gather-and-broadcast."""
    from benchmarks import reshard

    _show(reshard.run(), json_path)


@bench.command("delta")
def delta_(
    json_path: Results = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each way, in turn.", min=1)] = 5,
) -> None:
    """Sparse deltas of one rank's weights on this CPU: bytes per changed element; encoding, applying and digesting against memcpy."""
    from benchmarks import delta

    results = delta.run(rounds=rounds)
    _show(results, json_path)
    typer.echo(delta.table(results))


@bench.command("plan")
def plan_(json_path: Results = None) -> None:
    """Plans of published models, from 256 trainer ranks to 128 engine ranks: seconds and memory of a rank that plans its part."""
    from benchmarks import plans

    results = plans.run()
    _show(results, json_path)
    typer.echo(plans.table(results))


@bench.command("head")
def head_(
    json_path: Results = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each way, in turn.", min=1)] = 7,
) -> None:
    """The output layer with log-probabilities: all logits against blocks of the trained rows; seconds and bytes. Takes minutes."""
    from benchmarks import head

    results = head.run(rounds)
    _show(results, json_path)
    typer.echo(head.table(results))


@bench.command("memory")
def memory_(
    json_path: Results = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the micro-batch.", min=64)] = 32_768,
) -> None:
    """Memory of trainer ranks in a step of a long micro-batch with trainer.cp 1, 2 and 4: tensors, resident, planned. Takes minutes."""
    from benchmarks import step_memory

    results = step_memory.run(tokens)
    _show(results, json_path)
    typer.echo(step_memory.table(results))


@bench.command("sync")
def sync_(
    json_path: Results = None,
    updates: Annotated[int, typer.Option(help="Weight updates per case.", min=3)] = 30,
) -> None:
    """Weight updates of a real engine while it generates: its pause, and its speed during staging."""
    from benchmarks import sync

    _show(sync.run(updates), json_path)


@bench.command("checkpoint")
def checkpoint_(json_path: Results = None) -> None:
    """How long training pauses for a checkpoint, asynchronous or not, compared with a plain copy of the same state."""
    from benchmarks import checkpoint

    _show(checkpoint.run(), json_path)


@bench.command("lora")
def lora_(
    json_path: Results = None,
    updates: Annotated[int, typer.Option(help="Weight updates in each way.", min=3)] = 20,
) -> None:
    """The cost of an adapter update for a generating engine, compared with an update of all weights of the same model."""
    from benchmarks import lora

    results = lora.run(updates)
    _show(results, json_path)
    typer.echo(lora.table(results))


@bench.command("learning")
def learning_(
    results: Annotated[Path, typer.Option("--json", metavar="FILE", help="Results, to which the command adds missing ones.")],
    arms: Annotated[str, typer.Option(help="Names, separated by commas; default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="RL steps per run, with 32 samples each.")] = 24,
    minutes: Annotated[float, typer.Option(min=0.0, help="Start no further run after this many minutes.")] = 1e9,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write learning-dense.svg and learning-moe.svg there; with --minutes 0, run nothing.")
    ] = None,
    level: Annotated[float, typer.Option(min=0.01, max=1.0, help="Accuracy whose first time the results report.")] = 0.5,
) -> None:
    """A real model learns to add: arms that differ in one setting, with three seeds each. Takes hours; the same command resumes."""
    from benchmarks.learning import arms as known
    from benchmarks.learning import figures, runner
    from benchmarks.learning import pictures as drawing
    from benchmarks.learning.summary import summary

    chosen = known.chosen([name for name in arms.split(",") if name])
    if pictures is not None:
        runner.check_writable(pictures / "learning-dense.svg", "--pictures")
    runner.run(chosen, known.numbers(seeds), steps, results, minutes, typer.echo)
    if runs := runner.read(results)["runs"]:
        runner.write(results, runs, level={"accuracy": level}, arms=summary(figures.by_arm(runs), level))
    if pictures is not None:
        drawing.pictures(runner.read(results), pictures)


@bench.command("changes")
def changes_(
    results: Annotated[Path, typer.Option("--json", metavar="FILE", help="Results, to which the command adds missing ones.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of --config.")] = None,
    arm: Annotated[str, typer.Option(help="An arm of bench learning.")] = "dense-async",
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A run's configuration instead of an arm.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="RL steps of a run; each is exported.")] = 8,
    rates: Annotated[str, typer.Option(help="Learning rates, separated by commas.")] = "2e-5,2e-6",
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw all results as SVG.")] = None,
) -> None:
    """Share of the bfloat16 and float8 weights that a step of a real model changes, by kind of layer and learning rate."""
    from benchmarks.learning import arms as known
    from benchmarks.learning import changes, runner

    if picture is not None:
        runner.check_writable(picture, "--picture")
    if settings and config is None:
        raise UserError("KEY=VALUE", got=settings[0], expected="none without --config")
    subject = changes.of_arm(arm) if config is None else changes.of_configuration(config, settings or [])
    found = changes.run(results, subject, steps, known.rates(rates))
    if picture is not None:
        changes.picture(found, picture)


@bench.command("gpu")
def gpu_(
    scale: Annotated[float, typer.Option(metavar="X", min=0.01, max=1.0, help="Share of the model's layers.")] = 1.0,
    bucket_mib: Annotated[int, typer.Option(metavar="MIB", min=1, help="Messages of all lanes of a rank together.")] = 512,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where to write the results.")] = None,
) -> None:
    """Packing and unpacking of a shard of Qwen3-30B-A3B's shape on this machine's first GPU, against plain device-to-device copies."""
    from benchmarks import gpu

    results = gpu.run(scale, bucket_mib << 20)
    _show(results, json_path or gpu.results_path(results))


@bench.command("intake")
def intake_(
    json_path: Results = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each case; the best counts.", min=1)] = 3,
    shrink: Annotated[int, typer.Option(help="Divides the numbers of trajectories, for a trial.", min=1)] = 1,
) -> None:
    """Generations from stand-in engines into the controller's queue: tokens per second of its CPU time, event-loop lag, memory."""
    from benchmarks import intake

    results = intake.run(rounds, shrink)
    _show(results, json_path)
    typer.echo(intake.table(results))


@bench.command("batches")
def batches_(
    json_path: Results = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each way, in turn.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps per measurement; the first is not counted.", min=2)] = 5,
    compute_s: Annotated[float, typer.Option(help="Seconds a rank sleeps per step instead of computing.", min=0.0)] = 4.0,
) -> None:
    """The cost of each step's batch for a trainer rank, beyond compute: 1,024 trajectories with routes."""
    from benchmarks import batches

    results = batches.run(batches.BatchCase(steps=steps, compute_s=compute_s), rounds)
    _show(results, json_path)
    typer.echo(batches.table(results))


@bench.command("log")
def log_(
    json_path: Results = None,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure; default: a temporary one.")] = None,
) -> None:
    """Speed of the log for groups, turns and changes, each durable before the next, against the disk; CPU seconds. Needs 2 GB."""
    from benchmarks import log

    results = log.run(folder)
    _show(results, json_path)
    typer.echo(log.table(results))


@bench.command("async")
def async_(
    json_path: Results = None,
    workload: Annotated[list[str] | None, typer.Option(help="lognormal, math or search; default: all.")] = None,
    max_staleness: Annotated[int, typer.Option(help="Versions a trained token may be behind, in mode async.", min=0)] = 4,
    step_ms: Annotated[float, typer.Option(help="Milliseconds an engine sleeps per step.", min=0.0)] = 75.0,
) -> None:
    """Asynchronous, one-step-off and synchronous runs on the same engine and trainer: speed-ups, against the laws and the simulator."""
    from benchmarks import async_case, asynchrony

    results = asynchrony.run(
        workload or tuple(async_case.WORKLOADS), async_case.PoolSizes(max_staleness=max_staleness, step_s=step_ms / 1e3)
    )
    _show(results, json_path)
    typer.echo(asynchrony.table(results))


@bench.command("recovery")
def recovery_(
    json_path: Results = None,
    rounds: Annotated[int, typer.Option(help="Kills in each way, in turn.", min=3)] = 3,
) -> None:
    """Downtime of a run after a rank is killed, with the trainer restarted in place or everything restarted; and after the controller is
    killed and restarted in place."""
    from benchmarks import recovery

    results = recovery.run(rounds)
    _show(results, json_path)
    typer.echo(recovery.table(results))


@bench.command("colocated")
def colocated_(
    json_path: Results = None,
    switches: Annotated[int, typer.Option(help="Steps of the run whose memory is watched.", min=20)] = 200,
    pairs: Annotated[int, typer.Option(help="Runs in each way, in turn.", min=1)] = 6,
) -> None:
    """Trainer and engine on the same devices in turn: memory by state, its growth, seconds of a switch, a step next to placement=split."""
    from benchmarks import colocated

    _show(colocated.run(switches, pairs), json_path)


@bench.command("network")
def network_(
    json_path: Results = None,
    hosts: Annotated[list[str] | None, typer.Option(help="4+2: trainers and an engine of two; 2+4x2: four such; default: three.")] = None,
    rate: Annotated[float, typer.Option(help="Rate of every link in each direction, in Mbit/s.", min=1.0)] = 50.0,
    megabytes: Annotated[
        list[float] | None, typer.Option(help="About the models' sizes in bfloat16, from 40; default: 80.", min=40.0)
    ] = None,
    mtu: Annotated[int, typer.Option(help="Bytes of the largest IP packet.", min=576, max=9000)] = 1500,
    rounds: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 3,
    baselines: Annotated[bool, typer.Option(help="Gather and broadcast too.")] = True,
    changed: Annotated[str, typer.Option(metavar="PERCENTS", help="Also sparse deltas of versions with these changes: 0.3,1,3.")] = "",
) -> None:
    """Weights from trainer hosts to engine hosts (network namespaces) over links of a set rate: the share of the links' bound,
    and the savings of sparse deltas. Needs root, iproute2 and util-linux."""
    from benchmarks.network import run
    from benchmarks.network.changes import percents
    from benchmarks.network.hosts import Wire

    results = run.run(hosts or run.HOSTS, megabytes or (run.MEGABYTES,), Wire(round(rate * 1e6), mtu), rounds, baselines, percents(changed))
    _show(results, json_path)
    typer.echo(run.table(results))


@bench.command("hosts")
def hosts_(
    json_path: Results = None,
    rate: Annotated[float, typer.Option(help="Rate of every link in each direction, in Mbit/s.", min=1.0)] = 1000.0,
    steps: Annotated[int, typer.Option(help="Of 16 trajectories.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of a response; the context has room for 1,900.", min=1, max=1900)] = 400,
) -> None:
    """A whole run over five hosts (network namespaces): the controller, two rollout workers with an engine each, two trainer ranks;
    the bytes on each link. Needs root, iproute2 and util-linux."""
    from benchmarks.network import whole_run

    results = whole_run.run(rate, steps, tokens)
    _show(results, json_path)
    typer.echo(results["skipped"] or whole_run.table(results))


def _show(results: dict[str, Any], path: Path | None) -> None:
    """Print results, and write them to a file if requested."""
    import json

    from rich.console import Console

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    Console().print_json(data=results)
