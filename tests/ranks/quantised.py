"""Worker: what is exported of a checkpoint of float8 after its weights have changed. `quantised.py RESULT FOLDER CHANGE LAYOUT...`

FOLDER has the checkpoint in "hf". All of its parameters are multiplied by CHANGE; then, under every layout, "LAYOUT-plain" and
"LAYOUT-float8" are written beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asyncmoe.models import load_hf_config
from asyncmoe.trainer.model import gpt, mesh
from asyncmoe.weights.sender.gather import Gatherer
from asyncmoe.weights.sender.hf_files import SHARD_BYTES, write_hf
from tests.ranks import case, group
from tests.ranks.leaving import leave


def main(result: Path, path: Path, change: float, layouts: list[str]) -> None:
    group.begin()
    for layout in layouts:
        config = case.config(path, ranks=dist.get_world_size(), **case.sizes_of(layout))
        place = mesh.start(config.trainer)
        built = gpt.build(load_hf_config(path / "hf"), config, place)
        gpt.load_hf(built, path / "hf")
        with torch.no_grad():
            for chunk in built.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(change)
        for form, quantised in (("plain", False), ("float8", True)):
            write_hf(built, path / "hf", path / f"{layout}-{form}", Gatherer(built, SHARD_BYTES, 60.0, quantised=quantised))
        leave()
    if dist.get_rank() == 0:
        result.write_text("{}")
    mesh.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
