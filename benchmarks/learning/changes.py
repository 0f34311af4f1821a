"""How many bfloat16 weights a step changes, by kind of layer: python -m benchmarks.learning.changes OUT [LR...]

Trains the dense model for a few steps at each learning rate, with a checkpoint after every step, exports each, and compares neighbours bit
by bit. What an engine would have to receive, were only changes sent.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from safetensors import safe_open

from benchmarks.learning import arms, runner
from benchmarks.learning.runner import RUNS
from benchmarks.provenance import here

STEPS, RATES = 8, (2e-6, 2e-5, 1e-4)
KINDS: Mapping[str, str] = {
    "embedding": r"embed_tokens|lm_head",
    "attention": r"self_attn",
    "experts": r"experts|mlp\.(gate|up|down)_proj",
    "router": r"\.gate\.weight|router",
    "norms": r"norm",
}
"""Kind -> pattern of the names of its tensors in a Hugging Face checkpoint; the first that is found counts."""


def kind_of(name: str) -> str:
    """Return the kind of a tensor, "other" if none fits."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def changed(before: Path, after: Path) -> dict[str, tuple[int, int]]:
    """Compare two exported checkpoints of one `model.safetensors`; return by kind how many weights differ as bfloat16, and how many are."""
    found: dict[str, tuple[int, int]] = {}
    with safe_open(before / "model.safetensors", "pt") as one, safe_open(after / "model.safetensors", "pt") as other:
        for name in one.keys():  # noqa: SIM118  it is no mapping
            old, new = (file.get_tensor(name).to(torch.bfloat16) for file in (one, other))
            differing, total = found.get(kind_of(name), (0, 0))
            found[kind_of(name)] = (differing + int((old != new).sum()), total + old.numel())
    return found


def shares(exports: Sequence[Path]) -> dict[str, list[float]]:
    """Return by kind, and as "all", the share of the weights that each step changed."""
    steps = [changed(before, after) for before, after in pairwise(exports)]
    every = [{**step, "all": (sum(d for d, _ in step.values()), sum(n for _, n in step.values()))} for step in steps]
    return {kind: [float(f"{step[kind][0] / step[kind][1]:.4g}") for step in every] for kind in every[0]}


def measure(rate: float, steps: int) -> dict[str, list[float]]:
    """Train, export the checkpoint of every step, and compare them. Raises as `runner.finish`."""
    run_dir = RUNS / f"changes-{rate:.0e}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    (arm,) = arms.chosen(["dense-async"])
    kept = ["trainer.checkpoint_every=1", f"trainer.keep_checkpoints={steps + 1}", "evaluation.every=0", f"trainer.optimizer.lr={rate:g}"]
    runner.finish(run_dir, ["-m", "asyncmoe", "run", str(arms.CONFIGURATION), *arms.overrides(arm, 0, run_dir, steps), *kept], {})
    exports = [runner.ROOT / arm.model]
    for step in range(1, steps + 1):
        exports.append(run_dir / f"export-{step}")
        runner.finish(run_dir, ["-m", "asyncmoe", "export", str(run_dir), str(exports[-1]), "--step", str(step)], {})
    found = shares(exports)
    shutil.rmtree(run_dir)
    return found


def main() -> None:
    """Write OUT."""
    out, *rates = sys.argv[1:]
    runs = []
    for rate in [float(rate) for rate in rates] or RATES:
        found = measure(rate, STEPS)
        # Adam's first steps are of the size of the learning rate whatever the gradient; the later ones are what a run is made of.
        runs.append({"lr": rate, "mean": {kind: round(fmean(values[STEPS // 2 :]), 5) for kind, values in found.items()}, "steps": found})
        Path(out).write_text(json.dumps({**here(), "model": str(arms.DENSE), "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
