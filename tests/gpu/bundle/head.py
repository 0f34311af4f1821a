"""The output layer and log-probabilities of 8,192 tokens over 151,936 ids, forward and backward: `python -m tests.gpu.bundle.head RESULT`.

The weight's gradient goes to a float32 `main_grad`, as under Megatron's data parallelism. Without a card the sizes are small.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from asyncmoe.config.model import MadeModel
from asyncmoe.models import MegatronParallel, family_of, make
from asyncmoe.plan import activations
from asyncmoe.plan.activations import Microbatch
from asyncmoe.trainer.model.logprobs import target_logprobs
from tests.gpu.bundle.peak import Peak
from tests.gpu.bundle.summary import write_outcome

WARM, ROUNDS = 2, 5
PRODUCTS = 4
"""Matrix products of all rows and ids: the logits, once more for the backward pass, and the two gradients."""
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference from torch's log_softmax in nats; logits near 10 are rounded to 0.06 in bfloat16."""


def main() -> None:
    card = torch.cuda.is_available()
    device, (rows, hidden, vocabulary) = ("cuda", (8192, 2048, 151_936)) if card else ("cpu", (256, 64, 4096))
    dtype = torch.bfloat16 if card else torch.float32
    given = torch.randn(rows, hidden, device=device, dtype=dtype).requires_grad_()
    weight: Any = torch.nn.Parameter(torch.randn(vocabulary, hidden, device=device, dtype=dtype) * (3 / hidden**0.5))
    weight.main_grad = torch.zeros(vocabulary, hidden, device=device)
    targets = torch.randint(0, vocabulary, (rows,), device=device)

    def step() -> tuple[float, torch.Tensor]:
        begin = time.perf_counter()
        found = target_logprobs(given, weight, targets, 1.0, None, entropy=True).sampled
        found.sum().backward()  # type: ignore[no-untyped-call]
        weight.grad = given.grad = None
        if card:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, found.detach()

    for _ in range(WARM):
        step()
    peak = Peak()
    steps = [step() for _ in range(ROUNDS)]
    taken, named = peak.nbytes + given.nbytes, str(dtype).removeprefix("torch.")
    with torch.no_grad():
        whole = torch.log_softmax((given @ weight.t()).float(), dim=1).gather(1, targets[:, None]).squeeze(1)
    difference, seconds = float((steps[-1][1] - whole).abs().max()), median(seconds for seconds, _ in steps)
    hf = {**make.settings(MadeModel(hidden=hidden)), "vocab_size": vocabulary}
    planned = activations.head(family_of(hf).shape_of(hf), MegatronParallel(), Microbatch(rows, recompute=False, dtype=named, cpu=not card))
    figures = {
        "step": (seconds, "s"),
        "rate": (PRODUCTS * 2 * rows * hidden * vocabulary / seconds, "FLOP/s in matrix products"),
        "peak": (taken, "bytes besides the weight and its gradient"),
        "peak_share": (taken / planned, "of the bytes that asyncmoe plan expects"),
        "difference": (difference, "nats, largest, from log_softmax of all logits"),
    }
    write_outcome(Path(sys.argv[1]), figures)
    if not difference <= CLOSE[named]:
        sys.exit(
            f"log-probabilities: got a difference of {difference:.2e} nats, expected at most {CLOSE[named]:g} from torch's log_softmax"
        )


if __name__ == "__main__":
    main()
