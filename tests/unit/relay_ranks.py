"""A rank of a relay in a process of its own; torch is imported where it is needed, as it takes longer than all the rest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
from reshard_ranks import blank, filled, numbered

from asyncmoe.reshard import Box, LayoutBuilder, RankLayout, RelayExchanger, SharedTransport, Transport, relay
from asyncmoe.reshard.shm_transport import ShmTransport

SHAPES = {"w": (96, 40), "v": (50,)}
TRAINERS, BUCKET = 2, 2000


def layouts(engines: int) -> tuple[list[RankLayout], list[RankLayout]]:
    """Rows on two trainer ranks; columns on the two ranks of each engine, v on both."""
    source, destination = [], []
    for r in range(TRAINERS):
        builder = LayoutBuilder(r, "int32")
        builder.stack("w", [("w", Box((48 * r, 0), (48, 40)))])
        builder.stack("v", [("v", Box((25 * r,), (25,)))])
        source.append(builder.build())
    for r in range(2):
        builder = LayoutBuilder(r, "int32")
        builder.stack("w", [("w", Box((0, 20 * r), (96, 20)))])
        builder.stack("v", [("v", Box((0,), (50,)))])
        destination += [builder.build().at(TRAINERS + 2 * e + r) for e in range(engines)]
    return source, sorted(destination, key=lambda layout: layout.rank)


def play(rank: int, engines: int, way: str, place: str, session: str) -> None:
    source, destination = layouts(engines)
    plans = relay(SHAPES, source, destination, ranks=[rank])
    transports: Sequence[Transport | SharedTransport]
    if way == "gloo":
        import torch.distributed as dist

        from asyncmoe.reshard.torch_transport import TorchTransport

        world, store = TRAINERS + 2 * engines, dist.FileStore(str(Path(place, "store")), TRAINERS + 2 * engines)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        transports = [TorchTransport(dist.new_group()) for _ in plans]
    else:
        transports = [ShmTransport(rank, f"{session}-{number}") for number in range(len(plans))]
    values = numbered(SHAPES)
    held = filled(source[rank], values) if rank < TRAINERS else {}
    wanted = blank(destination[rank - TRAINERS]) if rank >= TRAINERS else {}
    with RelayExchanger(plans, transports, bucket_bytes=BUCKET, timeout_s=60, threads=1) as exchanger:
        exchanger.bind(held, wanted)
        for number in range(3):
            for array in held.values():
                array += 1000 * number
            moved = exchanger.run()
            for name, array in wanted.items():
                np.testing.assert_array_equal(array, filled(destination[rank - TRAINERS], values)[name] + 1000 * sum(range(number + 1)))
                array[...] = -1
        assert exchanger.buffer_bytes <= 4 * BUCKET
    Path(place, f"{rank}.done").write_text(f"{moved.sent} {moved.received}")
    if way == "gloo":
        dist.barrier()
        dist.destroy_process_group()
