"""The `asyncmoe` command. `run` starts a whole run on this machine; other subcommands start single parts."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from asyncmoe import config_commands, usage
from asyncmoe.cli import flight, models, planning, records, running
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
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)] = False,
) -> None:
    pass


for _panel, _commands in {
    "Run": (running.run, running.rollout, running.engine, running.worker),
    "Look at a run": (records.report, records.show, records.checkpoints, records.stacks, records.log),
    "Flight recorder": (flight.replay, flight.fork, flight.pack),
    "Before a run": (models.init, planning.doctor, planning.plan, planning.simulate),
    "Models": (models.make_model, models.export),
}.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.command("eval", rich_help_panel="Models")(running.eval_command)
app.add_typer(config_commands.app, name="config", rich_help_panel="Before a run")
app.add_typer(planning.bench, name="bench", rich_help_panel="Before a run")
_checkout = Path(__file__).parents[2]
if (_checkout / "benchmarks" / "commands.py").is_file():  # an installed wheel has no benchmarks
    sys.path.insert(0, str(_checkout))
    import benchmarks.commands  # noqa: F401  adds its commands to `bench`


def main() -> None:
    """Run the command line."""
    part.main(partial(usage.invoke, app))
    part.end()
