"""Transformer Engine loads on this card, though code for others was taken from it: `python -m tests.gpu.bundle.engine_loads RESULT`.

A norm and a product, which take kernels of its own and cuBLAS's, are compared with torch's in bfloat16; then in blocks of float8, whose
quantisation is its own.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bundle.summary import write_outcome

ROWS, HIDDEN, OUT, EPS = 256, 1024, 512, 1e-6
CLOSE = {"bfloat16": 1e-2, "float8": 5e-2}
"""Norm of the difference over the norm. A value of float8 has three bits after the first: each is off by at most 6 %."""


def main() -> None:
    begin = time.monotonic()
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    figures: dict[str, tuple[Any, str]] = {"import": (time.monotonic() - begin, "s")}
    layer = engine.LayerNormLinear(HIDDEN, OUT, EPS, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    wanted = torch.nn.functional.rms_norm(rows, (HIDDEN,), eps=EPS).float() @ layer.weight.float().t()
    for name, recipe in (("bfloat16", None), ("float8", recipes.Float8BlockScaling())):
        with engine.autocast(enabled=recipe is not None, recipe=recipe):
            got = layer(rows).float()
        difference = float((got - wanted).norm() / wanted.norm())
        figures[f"{name}_difference"] = (difference, "of torch's result")
        write_outcome(Path(sys.argv[1]), figures)
        if not difference <= CLOSE[name]:
            sys.exit(f"a product in {name}: got a difference of {difference:.2e}, expected at most {CLOSE[name]:g} of torch's result")


if __name__ == "__main__":
    main()
