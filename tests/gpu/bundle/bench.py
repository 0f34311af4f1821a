"""`asyncmoe bench gpu` with messages of several sizes: `python -m tests.gpu.bundle.bench RESULT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from tests.gpu.bundle.summary import write_outcome

MEGABYTES = (64, 4, 512, 16, 256)
"""Sizes of messages, those first that say most, should the rest not end in time."""
_BUCKET = 5
"""A bucket is so many messages: one for each of four lanes, and what is reserved (`asyncmoe.reshard.chunks.cuts_of`)."""
_NEEDED = 64 << 30
"""Bytes for a whole rank of the model on either side, as many to copy whole, its messages and some room."""


def main() -> None:
    """A card with less memory takes fewer layers; the figure "layers" says how many."""
    found: dict[str, tuple[Any, str]] = {}
    scale = min(1.0, torch.cuda.mem_get_info(0)[0] / _NEEDED)
    for size in MEGABYTES:
        results = gpu.run(scale, _BUCKET * size * 1_000_000)
        Path(os.environ.get("ASYNCMOE_BUNDLE_LOGS", "."), f"bench-gpu-{size}.json").write_text(json.dumps(results, indent=1) + "\n")
        found["layers"] = (results["model"]["num_hidden_layers"], "layers")
        for side in ("pack", "unpack"):
            one = results[side]
            found[f"{side}_{size}_share"] = (round(one["share"], 4), "of one copy of all bytes, by events")
            found[f"{side}_{size}_message"] = (one["bytes"] // one["messages"], "bytes")
            for name, rate in one["device_rate"].items():
                found[f"{side}_{size}_{name}"] = (rate and round(rate, 1), "GB/s by events")
                found[f"{side}_{size}_{name}_wall"] = (rate and round(one["rate"][name], 1), "GB/s by the wall clock")
        write_outcome(Path(sys.argv[1]), found)


if __name__ == "__main__":
    main()
