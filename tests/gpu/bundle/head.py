"""The output layer and log-probabilities of 8,192 tokens over 151,936 ids, forward and backward: `python -m tests.gpu.bundle.head RESULT`.

Without a card the sizes are small.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.head import Sizes, once
from tests.gpu.bundle.summary import write_outcome

SIZES = Sizes(8192, 2048, 151_936, "cuda", "bfloat16") if torch.cuda.is_available() else Sizes(256, 64, 4096)
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference from torch's log_softmax in nats; logits near 10 are rounded to 0.06 in bfloat16."""


def main() -> None:
    found = once(SIZES)
    figures = {
        "step": (found["s"], "s"),
        "rate": (found["rate"], "FLOP/s in matrix products"),
        "peak": (found["peak"], "bytes besides the weight, its gradient and the hidden rows"),
        "peak_share": (found["peak"] / found["foreseen"], "of the bytes that asyncmoe plan expects"),
        "difference": (found["differ"], "nats, largest, from log_softmax of all logits"),
    }
    write_outcome(Path(sys.argv[1]), figures)
    if not found["differ"] <= CLOSE[SIZES.dtype]:
        sys.exit(
            f"log-probabilities: got a difference of {found['differ']:.2e} nats, expected at most {CLOSE[SIZES.dtype]:g} from log_softmax"
        )


if __name__ == "__main__":
    main()
