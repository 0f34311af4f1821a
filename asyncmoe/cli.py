"""The `asyncmoe` command. Subcommands start the parts of a run separately; `run` starts all of them on this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from asyncmoe import config_commands
from asyncmoe.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="""Train mixture-of-experts language models with asynchronous reinforcement learning.

SGLang engines generate without waiting for stragglers, Megatron trainers
learn from a bounded queue, and new weights reach the engines while they
generate. One YAML file describes a run; the command line can override any
of its keys, which docs/config.md lists:

    asyncmoe run examples/demo.yaml run.steps=100 trainer.optimizer.lr=3e-4

Start with `asyncmoe run examples/demo.yaml`, then open runs/demo/report.html.""",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file that describes the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override, e.g. run.steps=100.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncmoe {importlib.metadata.version('asyncmoe')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_show_version)] = False,
) -> None:
    pass


@app.command()
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run everything on this machine: engines, queue, trainer, live view, report. Repeat the command to resume a stopped run.

    Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once. With launch=ray everything runs on the nodes of a Ray cluster.
    """
    from rich.console import Console

    from asyncmoe import config as configuration

    loaded = configuration.load(config, overrides or ())  # before the imports below, which need the compiled extension
    from asyncmoe.launch import local
    from asyncmoe.launch.ray import driver
    from asyncmoe.models.hub import with_local_model

    loaded = with_local_model(loaded)
    summary = driver.run(loaded) if loaded.launch == "ray" else local.run(loaded)
    Console().print_json(data=summary)


@app.command()
def rollout(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run only the controller: engines, episodes, scoring and the queue. It waits for a trainer."""
    from asyncmoe.launch import part

    part.controller(config, overrides or ())


@app.command()
def engine(
    config: ConfigPath,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Name in records and messages; default: made of the host, the SLURM job and --index.")
    ] = None,
    index: Annotated[int, typer.Option(help="Number of this engine on its machine, from 0; decides which GPUs it takes.")] = 0,
) -> None:
    """Start one engine that joins a run with engines.join=true, at any time.

    On Ctrl-C or SIGTERM it finishes or hands over its responses, then leaves.
    """
    from asyncmoe.launch import part

    part.engine(config, overrides or (), name, index)


@app.command("make-model")
def make_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    layers: Annotated[int, typer.Option(help="Decoder layers, each with experts.")] = 2,
    hidden: Annotated[int, typer.Option(help="Width of a hidden state.")] = 64,
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    experts_per_token: Annotated[int, typer.Option(help="Experts the router chooses for a token.")] = 2,
    expert_hidden: Annotated[int, typer.Option(help="Intermediate width of an expert.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny random Qwen3-MoE as a Hugging Face checkpoint, with a byte-level tokenizer, to try everything on a laptop."""
    from asyncmoe.config.model import MadeModel
    from asyncmoe.models import make

    shape = MadeModel(layers=layers, hidden=hidden, experts=experts, experts_per_token=experts_per_token, expert_hidden=expert_hidden)
    make.make_model(out, shape, seed=seed)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory with a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="For a run with train=lora: write only the adapter, in PEFT's format.")
    ] = False,
    float8: Annotated[
        bool, typer.Option("--float8", help="For a float8 model: write float8; otherwise weights are in the trainer's dtype.")
    ] = False,
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face checkpoint, with an adapter merged into the weights."""
    from asyncmoe.launch import export as launcher

    if adapter and float8:
        raise UserError("asyncmoe export", got="--adapter and --float8", expected="one of them; an adapter is not in float8")
    launcher.export(run_dir, out, "adapter" if adapter else "float8" if float8 else "weights")


@app.command()
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

    raise typer.Exit(command.run(arguments or (), as_json=as_json, compare=compare))


@app.command()
def plan(
    model: Annotated[
        Path | None, typer.Option(help="config.json of a Hugging Face model, or its directory. Weights are not needed.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="Parallel sizes of the trainer: tp=4,pp=2,ep=32,dp=32; also etp=, vpp= (model chunks per stage), first= and last= (layers "
            "of the first and last stage), and te for Transformer Engine's parameter names."
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
    context: Annotated[int, typer.Option(help="Tokens of the longest conversation and of a micro-batch.")] = 8192,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Take sizes and model from the YAML file of a run instead.")] = None,
    nvlink: Annotated[float, typer.Option(help="GB/s that a rank sends over NVLink while receiving as much.")] = 450.0,
    nic: Annotated[float, typer.Option(help="GB/s that a rank sends over its NIC while receiving as much.")] = 50.0,
    bucket_bytes: Annotated[int, typer.Option(help="Bucket size in bytes (sync.bucket_bytes).")] = 1 << 28,
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

    asyncmoe plan --config examples/demo.yaml
    """
    from rich.console import Console

    from asyncmoe.plan import plan_command, render_plan
    from asyncmoe.plan.traffic import Speeds

    speeds = Speeds(nvlink, nic)
    asked = plan_command.PlanArguments(
        model, trainer, engines, nodes, config, gpus_per_node, gpu_gb, context, dtype, bucket_bytes, speeds=speeds, lora=lora, family=family
    )
    found = plan_command.run(asked, Console())
    if json_file is not None:
        render_plan.write(found, json_file)


@app.command("simulate", context_settings={"ignore_unknown_options": True})  # `read_plant` refuses them
def simulate_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLANT] [KEY=VALUE]...",
            help="YAML file that describes cluster and run, and keys to override. docs/simulate.md lists the keys and their defaults.",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try several splits of the same GPUs between engines and trainer, each with --staleness.")
    ] = False,
    staleness: Annotated[
        str | None, typer.Option(metavar="LIST", help="Values of max_staleness that --sweep tries; default: 1,2,4,8.")
    ] = None,
    mode: Annotated[str, typer.Option(help="async, one_step_off, sync, or all. sync is always simulated, as the baseline.")] = "all",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also plot the figures to this .svg or .png file.")] = None,
) -> None:
    """Predict the speed of a run on a cluster, by simulating engines, queue, scoring, trainer and weight sync as events.

    The simulation starts no process and needs no GPU. It admits and drops
    groups by the same rules as `asyncmoe run`. Measure three things on a few
    GPUs and write them into a copy of examples/plant.yaml:

    - the step time of an engine at two batch sizes: engines.step_s, engines.step_batch

    - the seconds of a training step: trainer.step_s

    - some response lengths, one per line in a file: workload

    Then describe the whole cluster and find its best split:

        asyncmoe simulate examples/plant.yaml engines.count=96 trainer.gpus=32 --sweep

    It reports how many GPUs should generate, which max_staleness to choose,
    and the speed-up over synchronous training.
    """
    from rich.console import Console

    from asyncmoe.simulate import command, show

    show.check_plot(plot)
    bounds = command.staleness_bounds(staleness, sweep)
    found = command.run(command.read_plant(arguments or ()), mode, bounds)
    if json_file is not None:
        show.write(found, json_file)
    if plot is not None:
        show.plot(found, plot)
    show.table(found, Console())


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, of finished or running runs.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: report.html of the run, or comparison.html of the first.")
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Show sampled trajectories; only you can read a file that has some.")
    ] = True,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on loopback, live while a run goes on, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0: any free one.")] = 0,
) -> None:
    """Write report.html and summary.json of a run, finished or still running; of several runs, a page that compares them.

    --serve prints an address that only you know. To open it from another
    machine, forward its port: ssh -L 8080:127.0.0.1:PORT HOST.

    docs/guides/report.md explains the page.
    """
    from asyncmoe.telemetry.report import command

    if serve:
        from asyncmoe.telemetry.report.serve import serve as serve_page

        if out is not None:
            raise UserError("asyncmoe report", got="--serve and --out", expected="one of them")
        serve_page(run_dirs, port, samples=samples)
        return
    if port:
        raise UserError("asyncmoe report", got=f"--port {port} without --serve", expected="both, or neither")
    if len(run_dirs) == 1:
        from asyncmoe.telemetry.summary import write_summary

        write_summary(run_dirs[0])
    name = command.REPORT if len(run_dirs) == 1 else command.COMPARISON
    typer.echo(command.write(run_dirs, out or run_dirs[0] / name, samples=samples))


@app.command("log")
def log_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="wandb, mlflow or trackio; default: all that the run is configured for.")
    ] = None,
) -> None:
    """Send to W&B, MLflow or Trackio what they miss of a run: after a logger or the network was down, or after the run was killed.

    A running run sends its records itself, if its configuration has
    telemetry.wandb, telemetry.mlflow or telemetry.trackio:

        asyncmoe run examples/demo.yaml telemetry.mlflow.uri=http://127.0.0.1:5000

    Repeating this command sends nothing twice. docs/guides/loggers.md tells more.
    """
    from asyncmoe.telemetry.loggers import sender

    for name, state in sender.send(run_dir, names or []).items():
        typer.echo(f"{name}: has every step up to {state.sent.step}{' at ' if state.url else ''}{state.url}")


@app.command()
def stacks(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a running run.")]) -> None:
    """Show the Python stacks of every process of a run on this host, e.g. to see where it hangs. Needs py-spy, of the extra profile.

    The run's processes are those that it recorded in its directory, with
    their children. Of a run on several hosts, the end of the output names
    those not covered. To profile steps instead, see docs/guides/profiling.md.
    """
    from asyncmoe.launch import stacks as command

    for text in command.stacks(run_dir):
        typer.echo(f"{text}\n")


@app.command()
def show(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, of a finished or running run.")],
    step: Annotated[int | None, typer.Option(help="Groups that this step trained, counted as in metrics.jsonl.")] = None,
    group: Annotated[int | None, typer.Option(help="The group with this number, in all its attempts.")] = None,
    version: Annotated[int | None, typer.Option(help="Groups with a token that this weight version sampled.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Groups that were trained, queued, dropped, requeued, rejected or lost (in a restart of the run).")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest mean reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The highest mean reward first.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of groups; default: 3, or all of a --step or --group that is named.")
    ] = None,
    colour: Annotated[
        str, typer.Option("--colour", "--color", help="What colours tokens: version, logprob, ratio, mask or mismatch.")
    ] = "version",
    tokens: Annotated[int, typer.Option(min=0, help="Tokens shown of a prompt and of a response, from both ends; 0: all.")] = 400,
    plain: Annotated[bool, typer.Option("--plain", help="Lines for other programs; the default if the output is no terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each group, with all its tokens.")] = False,
) -> None:
    """Show trajectories of a run: prompts, responses, tool calls, rewards, and what the trainer made of each token.

    Without options: the groups of the newest step. Each token can be coloured
    by what is known of it:

    - version: the weight version that sampled it

    - logprob: its log-probability in the engine; ratio: trainer to engine

    - mask: trained, clipped, or rejected by the correction

    - mismatch: layers whose router would have sent it elsewhere

    For example:

        asyncmoe show runs/demo --worst --colour ratio

        asyncmoe show runs/demo --outcome rejected

        asyncmoe show runs/demo --step 420 --json | jq .reward

    telemetry.samples says how many groups a run keeps: by default 2 of each
    step's. docs/guides/samples.md explains what is shown.
    """
    from asyncmoe.telemetry.samples import command
    from asyncmoe.telemetry.samples.select import SampleQuery

    for first, second in (("--worst", "--best"), ("--plain", "--json")):
        if all({"--worst": worst, "--best": best, "--plain": plain, "--json": as_json}[name] for name in (first, second)):
            raise UserError("asyncmoe show", got=f"{first} and {second}", expected="one of them")
    wanted = SampleQuery(step, group, version, command.outcome_of(outcome), "worst" if worst else "best" if best else "newest", limit)
    form: command.Form = "json" if as_json else "plain" if plain or not sys.stdout or not sys.stdout.isatty() else "terminal"
    command.show(run_dir, wanted, form, command.colour_of(colour), tokens)


def _benchmarks() -> typer.Typer:
    """Return the commands of the folder `benchmarks` beside this package; an installed wheel does not have it."""
    checkout = Path(__file__).parents[1]
    if (checkout / "benchmarks" / "commands.py").is_file():
        sys.path.insert(0, str(checkout))
        from benchmarks.commands import bench

        return bench
    absent = typer.Typer(help="Run the benchmarks of a checkout.")

    @absent.callback(invoke_without_command=True)
    def refuse() -> None:
        hint = "clone asyncmoe's repository and run asyncmoe bench from its environment"
        raise UserError("benchmarks", got="an installed package", expected="a checkout, which has the folder benchmarks", hint=hint)

    return absent


app.add_typer(config_commands.app, name="config")
app.add_typer(_benchmarks(), name="bench")


def main() -> None:
    """Run the command line."""
    from functools import partial

    from asyncmoe import usage
    from asyncmoe.launch import part

    part.main(partial(usage.invoke, app))
