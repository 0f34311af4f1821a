"""Steps of a slice of Qwen3-30B-A3B on one card: `python -m tests.gpu.bundle.slice local|te RESULT`.

Four layers of full width with embedding and output layer, 8,192 packed tokens a step; "local": Megatron's layers on torch's kernels, "te":
Transformer Engine's. Without a card the slice is tiny, which tries everything but the figures.

A case's figures are those of `slice_steps.Steps.measured`. A layer's launches and time are half of what four layers have more than two.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmoe.config.trainer import TrainerSection
from asyncmoe.trainer.model import environment
from benchmarks.peak import Peak
from tests.gpu.bundle.summary import write_outcome

LAYERS = 4
CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "none": (LAYERS, {}),
    "half": (LAYERS // 2, {}),
    "selective": (LAYERS, {"recompute": "selective"}),
    "full": (LAYERS, {"recompute": "full"}),
    "fp8": (LAYERS, {"precision": "fp8", "edge_layers": 0}),
}
"""Layers of a case, and its keys of `trainer`."""
OF = {"local": ("none", "half", "selective", "full"), "te": ("none", "half", "fp8")}
CLOSE = 1e-2
"""Of the loss: recomputation and float8 change it by no more."""


def main() -> None:
    spec, result = sys.argv[1], Path(sys.argv[2])
    if spec == "local":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # as if it were not installed
    os.environ.setdefault(environment.SCALES, "1")
    from benchmarks import slice_steps as model  # prepares Megatron for what is installed

    place = model.mesh.start(TrainerSection())
    found: dict[str, tuple[Any, str]] = {"tokens": (model.COUNT * model.TOKENS, "tokens")}
    for case in OF[spec]:
        layers, trainer = CASES[case]
        peak = Peak()
        steps = model.Steps(place, layers, trainer)
        one = steps.measured(Path(os.environ.get("ASYNCMOE_BUNDLE_LOGS", result.parent), f"slice-{spec}-{case}.json.gz"))
        one |= {"peak": (peak.nbytes, "bytes"), "peak_share": (peak.nbytes / steps.planned, "of the bytes that asyncmoe plan expects")}
        steps.free()
        del steps  # and with it the optimizer's state
        found |= {f"{case}_{name}": figure for name, figure in one.items()}
        if layers < LAYERS:
            for name in ("launches", "step"):
                found[f"layer_{name}"] = ((found[f"none_{name}"][0] - one[name][0]) / (LAYERS - layers), one[name][1])
        write_outcome(result, found)
        loss, wanted = one["loss"][0], found["none_loss"][0]
        if layers == LAYERS and not abs(loss / wanted - 1) <= CLOSE:
            sys.exit(f"{case}: got a loss of {loss:.4f}, expected that of the same weights and tokens, {wanted:.4f}, to {CLOSE:.0e}")
    model.mesh.stop()


if __name__ == "__main__":
    main()
