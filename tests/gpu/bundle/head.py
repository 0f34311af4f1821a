"""The output layer and log-probabilities of 8,192 tokens over 151,936 ids, forward and backward: `python -m tests.gpu.bundle.head RESULT`.

Without a card the sizes are small.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks import head
from benchmarks.peak import Peak
from tests.gpu.bundle.summary import write_outcome

CARD = torch.cuda.is_available()
SIZES = head.Sizes(8192, 2048, 151_936, "cuda", "bfloat16") if CARD else head.Sizes(256, 64, 4096)
WARM, ROUNDS = 2, 5
PRODUCTS = 4
"""Matrix products of all rows and ids: the logits, once more for the backward pass, and the two gradients."""
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference from torch's log_softmax in nats; logits near 10 are rounded to 0.06 in bfloat16."""


def main() -> None:
    case = head.case_of(100, True, SIZES)

    def seconds() -> float:
        begin = time.perf_counter()
        head.counted(case)
        if CARD:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for _ in range(WARM):
        seconds()
    peak = Peak()
    step = median(seconds() for _ in range(ROUNDS))
    taken = peak.nbytes
    difference = float((head.counted(case) - head.full(case)).abs().max())
    figures = {
        "step": (step, "s"),
        "rate": (PRODUCTS * 2 * SIZES.rows * SIZES.hidden * SIZES.vocabulary / step, "FLOP/s in matrix products"),
        "peak": (taken, "bytes besides the weight and its gradient"),
        "peak_share": (taken / head.foreseen(SIZES.rows, True, SIZES), "of the bytes that asyncmoe plan expects"),
        "difference": (difference, "nats, largest, from log_softmax of all logits"),
    }
    write_outcome(Path(sys.argv[1]), figures)
    if not difference <= CLOSE[SIZES.dtype]:
        sys.exit(f"log-probabilities: got a difference of {difference:.2e} nats, expected at most {CLOSE[SIZES.dtype]:g} from log_softmax")


if __name__ == "__main__":
    main()
