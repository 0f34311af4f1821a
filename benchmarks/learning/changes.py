"""How many bfloat16 weights a step changes, by kind of layer, and how many if engines serve float8.

Trains an arm at each learning rate, with a checkpoint after every step, exports each, and compares neighbours bit by bit: what an engine
has to receive if only changes are sent.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors import safe_open

from asyncmoe import config as configuration
from asyncmoe.errors import UserError
from asyncmoe.reshard.float8 import BLOCK
from benchmarks.learning import arms, runner
from benchmarks.learning.runner import RUNS
from benchmarks.learning.style import BLUE, GREEN, INK, ORANGE, PURPLE, RED, style
from benchmarks.provenance import here

KINDS: Mapping[str, str] = {
    "embedding": r"embed_tokens|lm_head",
    "attention": r"self_attn",
    "experts": r"experts|mlp\.(gate|up|down)_proj",
    "router": r"\.gate\.weight|router",
    "norms": r"norm",
}
"""Kind -> pattern of the names of its tensors in a Hugging Face checkpoint; the first that is found counts."""


_QUANTISED = ("attention", "experts")


def kind_of(name: str) -> str:
    """Return the kind of a tensor, "other" if none fits."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


FLOAT8, SCALES = "float8", "float8_scales"
"""As kinds: matrices of attention and experts in float8, elements and scales of their blocks."""
_LARGEST, _LEAST = 448.0, 1e-4
"""Of float8_e4m3fn, and of a block's largest magnitude."""


def float8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix in blocks of 128 x 128, those at the edges smaller, as `asyncmoe.reshard.float8` does for engines.

    Returns:
        Bits of the elements, uint8 of the matrix's shape, and of the blocks' scales, int32[rows of blocks, columns of blocks].
    """
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=_LEAST) / _LARGEST
    coded = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return coded.reshape(padded.shape)[:rows, :columns], scales.view(torch.int32)


def changed(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    """Compare two exported checkpoints of one `model.safetensors`.

    Returns:
        By kind, how many weights differ as bfloat16, and how many there are; of `FLOAT8` and `SCALES`, how many differ as float8.
    """
    found: dict[str, tuple[int, int]] = {}

    def count(kind: str, old: torch.Tensor, new: torch.Tensor) -> None:
        differing, total = found.get(kind, (0, 0))
        found[kind] = (differing + int((old != new).sum()), total + old.numel())

    with safe_open(before / "model.safetensors", "pt") as one, safe_open(after / "model.safetensors", "pt") as other:
        for name in one.keys():  # noqa: SIM118  it is no mapping
            old, new = (file.get_tensor(name).to(torch.bfloat16) for file in (one, other))
            count(kind_of(name), old, new)
            if kind_of(name) in _QUANTISED and old.dim() == 2:
                for kind, one_of, other_of in zip((FLOAT8, SCALES), float8(old), float8(new), strict=True):
                    count(kind, one_of, other_of)
    return found


def shares(exports: Sequence[Path]) -> dict[str, list[float]]:
    """Return by kind, and as "all", the share of the weights that each step changed."""
    steps = [changed(before, after) for before, after in pairwise(exports)]
    once = [[count for kind, count in step.items() if kind not in (FLOAT8, SCALES)] for step in steps]
    every = [{**step, "all": (sum(d for d, _ in own), sum(n for _, n in own))} for step, own in zip(steps, once, strict=True)]
    return {kind: [float(f"{step[kind][0] / step[kind][1]:.4g}") for step in every] for kind in every[0]}


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        settings: overrides of the configuration.
        start: the model before the first step; None: the checkpoint at the end of `warmup` steps.
    """

    name: str
    configuration: Path
    settings: tuple[str, ...]
    start: Path | None
    warmup: int = 0


def of_arm(name: str) -> Subject:
    """Return an arm of bench learning.

    Raises:
        UserError: there is no such arm, or its model is missing.
    """
    (arm,) = arms.chosen([name])
    runner.check_model(arm.model, name)
    return Subject(name, arm.configuration, tuple(arms.overrides(arm, 0, RUNS / name, 1)), runner.ROOT / arm.model)


def of_configuration(path: Path, settings: Sequence[str]) -> Subject:
    """Return a configuration as it is, with overrides.

    Raises:
        UserError: it is not valid, or its model is neither there nor made by the warm-up.
    """
    config = configuration.load(path, settings)
    warmup, model = config.warmup.steps, config.model.path
    if not warmup and not (model / "config.json").is_file():
        raise UserError("model.path", got=f"{model}, which is not there", expected="a model, or a configuration with a warm-up")
    return Subject(path.stem, path.absolute(), tuple(settings), None if warmup else model.absolute(), warmup)


def measure(subject: Subject, rate: float, steps: int) -> dict[str, list[float]]:
    """Train, export the checkpoint of every step, and compare them. Raises as `runner.finish`."""
    run_dir = RUNS / f"changes-{subject.name}-{rate:.0e}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    kept = (
        *(f"run.dir={run_dir}", f"run.steps={steps}", "evaluation.every=0", f"trainer.optimizer.lr={rate:g}"),
        *("trainer.checkpoint_every=1", f"trainer.keep_checkpoints={steps + 1}"),
    )
    runner.finish(run_dir, ["-m", "asyncmoe", "run", str(subject.configuration), *subject.settings, *kept], {})
    exports = [] if subject.start is None else [subject.start]
    for step in range(subject.warmup + (0 if subject.start is None else 1), subject.warmup + steps + 1):
        exports.append(run_dir / f"export-{step}")
        runner.finish(run_dir, ["-m", "asyncmoe", "export", str(run_dir), str(exports[-1]), "--step", str(step)], {})
    found = shares(exports)
    shutil.rmtree(run_dir)
    return found


def picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the shares: by learning rate for each kind of layer, and step by step. Solid: the first arm; dashed, dotted: others."""
    names = list(dict.fromkeys(run["arm"] for run in runs))
    with style():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        keys: dict[str, Any] = {}
        for name, line in zip(names, ("-", "--", ":", "-."), strict=False):
            mine = sorted((run for run in runs if run["arm"] == name), key=lambda run: float(run["lr"]))
            for kind, colour in zip(("all", *KINDS), (INK, BLUE, GREEN, ORANGE, RED, PURPLE), strict=True):
                points = [(run["lr"], 100 * run["mean"][kind]) for run in mine if kind in run["mean"]]
                if points:
                    (keys[f"{name}, {kind}"],) = left.plot(*zip(*points, strict=True), line, color=colour, marker="o", markersize=3)
            for run in mine:
                values = [100 * value for value in run["steps"]["all"]]
                right.plot(range(1, len(values) + 1), values, line, color=INK)
                right.annotate(f"{run['lr']:g}", (len(values), values[-1]), xytext=(3, 0), textcoords="offset points", va="center")
        left.set(xscale="log", yscale="log", xlabel="learning rate", title="Changed bfloat16 weights, % a step")
        right.set(yscale="log", xlabel="step", title="All weights, by learning rate, % a step")
        figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=4)
        figure.savefig(path, metadata={"Date": None})


def run(results: Path, subject: Subject, steps: int, rates: Sequence[float]) -> Sequence[Mapping[str, Any]]:
    """Add to `results` what it lacks; return the records of all. Raises as `runner.run`."""
    runner.check_writable(results, "--json")
    held = runner.read(results, {"arm", "lr", "mean", "steps"})
    for rate in rates:
        if any((one["arm"], one["lr"]) == (subject.name, rate) for one in held["runs"]):
            continue
        found = measure(subject, rate, steps)
        # Adam's first steps are of the size of the learning rate whatever the gradient; the later ones are what a run is made of.
        mean = {kind: round(fmean(values[steps // 2 :]), 6) for kind, values in found.items()}
        held["runs"].append({"arm": subject.name, "lr": rate, **here(), "mean": mean, "steps": found})
        runner.write(results, held["runs"])
    return list(held["runs"])
