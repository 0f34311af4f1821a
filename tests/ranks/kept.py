"""Worker: what every layout makes of trajectories with recorded experts and ids. `kept.py RESULT REFERENCES LAYOUT...`

A layout is a list of the trainer's settings, such as "tp=2,pp=2,recompute=full".
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncmoe.models import family_of, load_hf_config
from asyncmoe.trainer import losses, objective, step
from asyncmoe.trainer.data import batch
from asyncmoe.trainer.model import gpt, mesh, optimizer
from asyncmoe.trainer.model.replay import Replay
from asyncmoe.trajectory import decode
from tests.ranks import case, parity


def main(result: Path, path: Path, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    found = {layout: {how: parity.worst(kept(path, layout, how == "packed")) for how in ("packed", "single")} for layout in layouts}
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found, indent=1))
    mesh.stop()


def settings_of(layout: str) -> dict[str, Any]:
    parts = (part.partition("=") for part in layout.split(","))
    return {key: int(value) if value.isdecimal() else value for key, _, value in parts}


def kept(path: Path, layout: str, packed: bool) -> dict[str, Any]:
    """Errors against the references; maxima, of gradients relative to the tensor's largest element."""
    if mesh.groups.is_initialized():
        mesh.leave()
    config = case.config(path, ranks=dist.get_world_size(), pack=packed, optimizer={"clip_grad": 1e9}, **settings_of(layout))
    place = mesh.start(config.trainer)
    hf = load_hf_config(path / "hf")
    built = gpt.build(hf, config, place)
    gpt.load_hf(built, path / "hf")
    routing = family_of(hf).routing(hf)
    assert routing is not None
    replay = Replay(built.chunks, built.config, routing, (place.tp_rank, place.tp))
    job = parity.Job(path, config, place, torch.load(path / "kept.pt", weights_only=False))
    known = dict(enumerate(decode(frames) for frames in msgspec.msgpack.decode((path / "kept.msgpack").read_bytes())))
    weights = objective.token_weights([int(t.loss_mask.sum()) for t in known.values()], "token_mean")
    batches = [
        batch.pack(
            known,
            indices,
            advantages=np.zeros(len(known)),
            weights=weights,
            grid=place.grid,
            packed=packed,
            rows=job.schedule.rows,
            routing=replay.routing,
        )
        for indices in job.schedule.ranks[place.dp_rank]
    ]
    logprobs = step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE, replay)
    adam = optimizer.build(config, built)
    stepped = step.train_step(built, adam, batches, losses.SupervisedLoss(case.TEMPERATURE), lr=0.0, replay=replay)
    unkept = step.logprobs_only(built, batches, case.LENGTHS, case.TEMPERATURE)
    wanted = job.reference["logprobs"]
    return {
        "logprobs": max(float(np.abs(logprobs[i] - want).max()) for i, want in enumerate(wanted)),
        "unkept_logprobs": max(float(np.abs(unkept[i] - want).max()) for i, want in enumerate(wanted)),
        "loss": abs(stepped.loss - job.reference["loss"]),
        "gradients": parity.relative_error(parity.gradients(built), parity.expected(built, path / "kept")),
        "routers": sum(name.endswith("router.weight") for name in parity.gradients(built)) * 1.0,
        "differ": max(
            abs(stepped.routing_mismatch[layer] - share) for layer, share in zip(routing.layers, job.reference["differ"], strict=True)
        ),
        "microbatches": len(batches),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
