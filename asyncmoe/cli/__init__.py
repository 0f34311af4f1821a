"""The `asyncmoe` command. Subcommands start the parts of a run separately; `run` starts all of them on this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from asyncmoe import config_commands, usage
from asyncmoe.cli import models, planning, records, running
from asyncmoe.launch import part

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


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncmoe {importlib.metadata.version('asyncmoe')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_show_version)] = False,
) -> None:
    pass


for _command in (
    running.run,
    running.rollout,
    running.engine,
    running.worker,
    models.init,
    models.make_model,
    models.export,
    planning.doctor,
    planning.plan,
    planning.simulate,
    records.report,
    records.checkpoints,
    records.stacks,
    records.show,
):
    app.command()(_command)
app.command("eval")(running.eval_command)
app.command("log")(records.log_command)
app.add_typer(config_commands.app, name="config")
_checkout = Path(__file__).parents[2]
if (_checkout / "benchmarks" / "commands.py").is_file():  # an installed wheel has no benchmarks
    sys.path.insert(0, str(_checkout))
    from benchmarks.commands import bench

    app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    part.main(partial(usage.invoke, app))
    part.end()
