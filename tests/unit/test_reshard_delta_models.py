"""Deltas between the layouts of every family's trainers and engines, at small sizes: delta = dense, and digests agree everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from delta_ranks import Ranks, change
from model_cases import MODELS, of_every_family
from reshard_ranks import Arrays, blank, filled, numbered

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.reshard import DeltaDecoder, DeltaEncoder, plan

GRIDS = {
    "1 -> 1": (MegatronParallel(), EngineParallel()),
    "tp2pp2ep2 -> tp2ep2": (MegatronParallel(tp=2, pp=2, ep=2, dp=2, te=True), EngineParallel(tp=2, ep=2)),
    "dp3 -> tp4": (MegatronParallel(dp=3), EngineParallel(tp=4)),
}


@of_every_family(GRIDS, "tp2pp2ep2 -> tp2ep2")
def test_five_versions_of_every_family(hf: dict[str, Any], trainer: MegatronParallel, engine: EngineParallel) -> None:
    """Two engines; values of float32 in storages of any dtype, so that each element is another number at first."""
    family = family_of(hf)
    shapes = family.tensors(hf)
    source = family.megatron_layouts(hf, trainer, "float32")
    destination = family.sglang_layouts(hf, engine, "float32", 2, first=trainer.world)
    values = numbered(shapes, np.float32)
    sources = {layout.rank: filled(layout, values, np.float32) for layout in source}
    ranks = Ranks(
        plan(shapes, source, destination), sources, {one.rank: blank(one, np.float32) for one in destination}, bucket_bytes=1 << 17
    )
    ranks.full(1)
    generator = np.random.default_rng(0)
    for version, density in enumerate((0.01, 0.001, 0.5, 0.0, 1.0), 2):
        for tensor in values.values():
            change(tensor, density, generator)
        for layout in source:
            for name, array in filled(layout, values, np.float32).items():
                ranks.sources[layout.rank][name][...] = array
        ranks.update(version)
        ranks.check(shapes, destination)


def bits(arrays: Arrays) -> Arrays:
    """Numbers as the bits of bfloat16."""
    return {name: array.view(np.uint16) for name, array in arrays.items()}


def test_every_rank_plans_its_own_part() -> None:
    """Storages have other numbers in a part of a plan than in the whole; messages fit nevertheless."""
    hf, trainer, engine = MODELS["qwen3_moe"], *GRIDS["tp2pp2ep2 -> tp2ep2"]
    family = family_of(hf)
    shapes = family.tensors(hf)
    source = family.megatron_layouts(hf, trainer, "bfloat16")
    destination = family.sglang_layouts(hf, engine, "bfloat16", first=trainer.world)
    values = {name: array.astype(np.int16) for name, array in numbered(shapes).items()}
    parts = {layout.rank: plan(shapes, source, destination, ranks=[layout.rank]) for layout in (*source, *destination)}
    held = {layout.rank: bits(filled(layout, values, np.int16)) for layout in (*source, *destination)}
    senders = {one.rank: DeltaEncoder(parts[one.rank], one.rank) for one in source}
    receivers = {one.rank: DeltaDecoder(parts[one.rank], one.rank, limit_bytes=1 << 40) for one in destination}
    for rank, sender in senders.items():
        sender.bind(held[rank])
        sender.full(1)
    for rank, receiver in receivers.items():
        receiver.bind(held[rank])
        receiver.adopt(1, {source: sender.digest(rank) for source, sender in senders.items()})
    for tensor in values.values():
        change(tensor, 0.02, np.random.default_rng(1))
    for rank, sender in senders.items():
        fresh = bits(filled(next(layout for layout in source if layout.rank == rank), values, np.int16))
        sender.bind(fresh)
        assert sender.encode(2, limit_bytes=1 << 40) is not None
    for layout in destination:
        receiver = receivers[layout.rank]
        receiver.expect({rank: sender.sizes(layout.rank) for rank, sender in senders.items() if sender.sizes(layout.rank)})
        for rank, sender in senders.items():
            for number, size in enumerate(sender.sizes(layout.rank)):
                message = np.empty(size, np.uint8)
                sender.put(layout.rank, number, int(message.ctypes.data))
                receiver.take(rank, number, int(message.ctypes.data))
        receiver.prove({rank: sender.digest(layout.rank) for rank, sender in senders.items()})
        receiver.commit(2)
        for name, expected in bits(filled(layout, values, np.int16)).items():
            np.testing.assert_array_equal(held[layout.rank][name], expected)
