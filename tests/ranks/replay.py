"""Worker: log-probabilities of recorded trajectories under every layout of this world size. `replay.py RESULT DIRECTORY LAYOUT...`

DIRECTORY holds `hf` (the weights that sampled them) and `trajectories.msgpack`. A layout is "tp,pp,ep".
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.models import load_hf_config
from asyncmoe.trainer import batch, mesh, model, step
from asyncmoe.trajectory import Trajectory, decode
from tests.ranks import case


def main(result: Path, path: Path, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    recorded = [decode(frames) for frames in msgspec.msgpack.decode((path / "trajectories.msgpack").read_bytes())]
    found = {}
    for layout in layouts:
        tp, pp, ep = map(int, layout.split(","))
        for how in ("packed", "single"):
            found[f"{layout} {how}"] = largest_difference(path, recorded, {"tp": tp, "pp": pp, "ep": ep, "pack": how == "packed"})
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    mesh.stop()


def largest_difference(path: Path, recorded: list[Trajectory], trainer: dict[str, object]) -> float:
    """Over every sampled token of every trajectory, between this trainer and what the engine recorded."""
    if mesh.groups.is_initialized():
        mesh.leave()
    config = case.config(path, ranks=dist.get_world_size(), tokens_per_microbatch=256, **trainer)
    place = mesh.start(config.trainer)
    built = model.build(load_hf_config(path / "hf"), config, place)
    model.load_hf(built, path / "hf")
    lengths = [len(t) for t in recorded]
    schedule = batch.schedule(lengths, place.dp, 256, config.trainer.pack, place.grid)
    nothing = np.zeros(len(recorded))
    batches = [
        batch.pack(dict(enumerate(recorded)), indices, advantages=nothing, weights=nothing, grid=place.grid, packed=config.trainer.pack)
        for indices in schedule.ranks[place.dp_rank]
    ]
    ours = step.logprobs_only(built, batches, lengths, case.TEMPERATURE)
    return max(float(np.abs(ours[i] - t.logprobs)[t.loss_mask].max()) for i, t in enumerate(recorded))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
