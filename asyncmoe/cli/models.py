"""Commands that make and export models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncmoe.config_commands import RunPath
from asyncmoe.errors import UserError

_Size = partial(typer.Option, min=1, max=1 << 20)


def make_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    layers: Annotated[int, _Size(help="Decoder layers, each with experts.")] = 2,
    hidden: Annotated[int, _Size(help="Width of a hidden state.")] = 64,
    experts: Annotated[int, _Size(help="Experts per layer.")] = 8,
    experts_per_token: Annotated[int, _Size(help="Experts the router chooses for a token.")] = 2,
    expert_hidden: Annotated[int, _Size(help="Intermediate width of an expert.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.", min=0, max=(1 << 63) - 1)] = 0,
) -> None:
    """Write a tiny random model, to try everything on a laptop.

    It is a Qwen3-MoE in Hugging Face's format, with a byte-level tokenizer.
    """
    from asyncmoe.config.model import MadeModel
    from asyncmoe.models import make

    shape = MadeModel(layers=layers, hidden=hidden, experts=experts, experts_per_token=experts_per_token, expert_hidden=expert_hidden)
    make.make_model(out, shape, seed=seed)


def init(
    model: Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint, or its id on the hub.")],
    data: Annotated[Path, typer.Option(help="File or directory of questions with answers, or the id of a data set on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="[OUT]", help="YAML file to write; must not exist.")] = Path("run.yaml"),
    subset: Annotated[str | None, typer.Option(help="Configuration of a data set on the hub, for example main.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set; default: train.")] = None,
) -> None:
    """Write a configuration for a model and a data set.

    The command finds the columns of questions and answers by their usual names, and sizes trainer and engines for this machine's GPUs, or
    for CPUs if it has none. For example:

        asyncmoe init --model Qwen/Qwen3-30B-A3B --data train.jsonl maths.yaml
    """
    from asyncmoe.config.task import WeightedSource
    from asyncmoe.launch import init as launcher

    launcher.write(model, WeightedSource(path=data, subset=subset, split=split), out)
    typer.echo(f"wrote {out}; next: asyncmoe config validate {out} && asyncmoe run {out}")


def export(
    run_dir: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="For a run with train=lora: write only the adapter, in PEFT's format.")
    ] = False,
    float8: Annotated[bool, typer.Option("--float8", help="For a float8 model: write float8 weights, not the trainer's dtype.")] = False,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Dtype to write; default: the trainer's.")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint (see `asyncmoe checkpoints RUN`); default: newest.")
    ] = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model.

    An adapter is merged into the weights, unless --adapter is given. README.md in OUT is a model card.
    """
    from asyncmoe.launch import export as launcher

    if adapter and float8:
        raise UserError("asyncmoe export", got="--adapter and --float8", expected="only one of the two; an adapter is never in float8")
    launcher.export(run_dir, out, "adapter" if adapter else "float8" if float8 else "weights", step=step, dtype=dtype)
