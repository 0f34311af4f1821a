"""Worker: exports of a float8 checkpoint after its weights have changed. `quantised.py RESULT FOLDER CHANGE LAYOUT...`

FOLDER has the checkpoint in "hf". All of its parameters are multiplied by CHANGE; then, under every layout, "LAYOUT-plain" and
"LAYOUT-float8" are written beside it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from asyncmoe.trainer.model import mesh
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.hf_files import SHARD_BYTES, write_hf
from tests.ranks import case, group, parity
from tests.ranks.leaving import leave


def main(folder: str, change: str, *layouts: str) -> None:
    path = Path(folder)
    for layout in layouts:
        config = case.config(path, ranks=dist.get_world_size(), **case.settings_of(layout))
        built = parity.Job(path, config, mesh.start(config.trainer), {}).model()
        with torch.no_grad():
            for chunk in built.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(float(change))
        for form, quantised in (("plain", False), ("float8", True)):
            write_hf(built, path / "hf", path / f"{layout}-{form}", Gatherer(built, SHARD_BYTES, 60.0, quantised=quantised))
        leave()


if __name__ == "__main__":
    group.run(main)
