"""`asyncmoe bench gpu` with large and with small messages: `python -m tests.gpu.bundle.bench RESULT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from tests.gpu.bundle.summary import write_outcome

CASES = {"": (512 << 20, 1.0), "_small": (64 << 20, 0.25)}
"""Suffix of the figures -> bytes of a message at most, share of the model's layers."""
_NEEDED = 48 << 30
"""Bytes for a whole rank of the model on either side, its messages and some room."""


def main() -> None:
    """A card with less memory takes fewer layers; the figure "layers" says how many."""
    found: dict[str, tuple[Any, str]] = {}
    share = min(1.0, torch.cuda.mem_get_info(0)[0] / _NEEDED)
    for suffix, (bucket, scale) in CASES.items():
        results = gpu.run(scale * share, bucket)
        Path(os.environ.get("ASYNCMOE_BUNDLE_LOGS", "."), f"bench-gpu{suffix}.json").write_text(json.dumps(results, indent=1) + "\n")
        found[f"layers{suffix}"] = (results["model"]["num_hidden_layers"], "layers")
        for side in ("pack", "unpack"):
            found[f"{side}_share{suffix}"] = (round(results[side]["share"], 4), "of a device copy")
            found[f"{side}_rate{suffix}"] = (round(results[side]["rate"]["copy"], 1), "GB/s")
            found[f"{side}_copy_rate{suffix}"] = (round(results[side]["rate"]["memcpy"], 1), "GB/s")
        write_outcome(Path(sys.argv[1]), found)  # what there is, should the next not end in time


if __name__ == "__main__":
    main()
