"""Deltas between the layouts of every family's trainers and engines, at small sizes: delta = dense, and digests agree everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from model_cases import of_every_family
from reshard_ranks import numbered
from test_reshard_delta import ranks_of, step

from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload

GRIDS = {
    "1 -> 1": (MegatronParallel(), EngineParallel()),
    "tp2pp2ep2 -> tp2ep2": (MegatronParallel(tp=2, pp=2, ep=2, dp=2, te=True), EngineParallel(tp=2, ep=2)),
    "dp3 -> tp4": (MegatronParallel(dp=3), EngineParallel(tp=4)),
}


@of_every_family(GRIDS, "tp2pp2ep2 -> tp2ep2")
def test_five_versions_of_every_family(hf: dict[str, Any], trainer: MegatronParallel, engine: EngineParallel) -> None:
    """Two engines; each element is another number at first."""
    payload = Payload(hf)
    shapes, source = payload.tensors(), payload.trainer(trainer, "float32")
    destination = payload.engines(engine, "float32", 2, first=trainer.world)
    case, values = (shapes, source, destination), numbered(shapes)
    ranks = ranks_of(case, values, bucket_bytes=1 << 17)
    ranks.full(1)
    for version, density in enumerate((0.01, 0.001, 0.5, 0.0, 1.0), 2):
        step(ranks, case, values, density, np.random.default_rng(version))
        ranks.update(version)
        ranks.check(shapes, destination)
