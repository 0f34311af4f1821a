"""Commands that start a whole run on this machine, or one part of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncmoe import interrupts
from asyncmoe.config_commands import ConfigPath, Overrides, checked_keys
from asyncmoe.imports import uncollected
from asyncmoe.process import unbroken_output


def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run everything on this machine, or resume a stopped run.

    The command starts engines, queue and trainer, and writes the report.

    CONFIG may be the directory of a run, which then resumes there, even if it was moved or copied:

        asyncmoe run runs/demo run.steps=200

    Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once. With launch=ray everything runs on the nodes of a Ray cluster.
    """
    from asyncmoe.config import moved

    unbroken_output()
    with interrupts.stopping(interrupts.NO_RUN_YET):
        moved.check_place(config, overrides or ())
        loaded = checked_keys(config, overrides or ())  # before the imports below, which need the compiled extension
    with interrupts.leaving(interrupts.NO_RUN_YET), uncollected():
        from rich.console import Console

        from asyncmoe.launch import local
        from asyncmoe.launch.ray import driver
        from asyncmoe.models.hub import with_local_model
    with interrupts.stopping(interrupts.NO_RUN_YET):
        loaded = with_local_model(loaded)
    summary = driver.run(loaded) if loaded.launch == "ray" else local.run(loaded)
    Console().print_json(data=summary)


def eval_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a Hugging Face checkpoint, or its id on the hub.")],
    config: ConfigPath,
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the scores to FILE: a line for each set, as in evaluation.jsonl.")
    ] = None,
) -> None:
    """Score a checkpoint on the evaluation sets, without a run.

    The configured engines start on this machine with MODEL, and answer the same
    questions as in a run, with the same sampling and scorers. For example:

        asyncmoe eval runs/demo-hf examples/demo.yaml evaluation.every=1
    """
    with interrupts.stopping("stopped; its engines have ended"):
        import msgspec

        from asyncmoe import config as configuration
        from asyncmoe import tables
        from asyncmoe.launch import evaluate
        from asyncmoe.storage import writing

        found = evaluate.evaluate(model, configuration.load(config, overrides or ()))
    tables.console().print(evaluate.table(found))
    if json_file is not None:
        with writing("scores", json_file):
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in found))


def rollout(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run only the controller; engines and a trainer join it.

    The controller runs the episodes, the scoring and the queue.
    """
    from asyncmoe.config import moved
    from asyncmoe.launch import part

    moved.check_place(config, overrides or ())
    part.controller(config, overrides or ())


def engine(
    config: ConfigPath,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="Name in records and messages; default: built from the host, the SLURM job and --index.")
    ] = None,
    index: Annotated[int, typer.Option(help="Number of this engine on its machine, from 0; decides which GPUs it takes.")] = 0,
    node: Annotated[int, typer.Option(help="With engines.nodes above 1: index of this machine among the engine's nodes, from 0.")] = 0,
) -> None:
    """Start one engine that joins a run, at any time.

    For an engine over several machines (engines.nodes), run the command on each of them, with the same --name:

        asyncmoe engine CONFIG --name engine.a --node 1

    On Ctrl-C or SIGTERM the engine finishes or hands over its responses, then leaves.
    """
    from asyncmoe.launch import part

    part.engine(config, overrides or (), name, index, node)


def worker(
    config: ConfigPath,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option(help="Number of this worker among the run's rollout.workers, from 1.")] = 1,
) -> None:
    """Start one rollout worker that joins a run, on any machine.

    Use this command if rollout.start_workers is false. The machine needs access to the log's folder.

    The worker runs episodes and holds their trajectories until the trainer has fetched them. It may start before or after the controller,
    and ends with the run. If a worker is lost, restart it under the same number.
    """
    from asyncmoe.launch import part

    part.worker(config, overrides or (), number)
