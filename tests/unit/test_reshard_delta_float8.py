"""Deltas of weights that are rounded or quantised on the way: bit for bit equal to a dense exchange of the same sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delta_ranks import Ranks
from reshard_ranks import Arrays, run_ranks
from test_reshard_float8 import SHAPES, chosen, empty, filled, random, shards

from asyncmoe.reshard import plan
from asyncmoe.reshard.float8 import BLOCK, SCALES, with_scale_tensors, with_scales, write_scales


class Quantised:
    """Both sides, and what dense exchanges bring."""

    def __init__(self, dtype: str, float8: bool) -> None:
        source, destination = shards(dtype)
        self.shapes = with_scale_tensors(SHAPES, chosen) if float8 else SHAPES
        if float8:
            source = [with_scales(layout, SHAPES, chosen, quantised=False) for layout in source]
            destination = [with_scales(layout, SHAPES, chosen, quantised=True) for layout in destination]
        self.source, self.destination, self.float8 = source, destination, float8
        self.plan = plan(self.shapes, source, destination)
        self.values = {name: random((*shape, 1)[:2], 7, dtype).reshape(shape) for name, shape in SHAPES.items()}
        self.held: dict[int, Arrays] = {layout.rank: filled(layout, self.values) for layout in source}
        self.got: dict[int, Arrays] = {layout.rank: empty(layout) for layout in destination}
        self.ranks = Ranks(self.plan, self.held, self.got, bucket_bytes=1 << 17)

    def load(self) -> None:
        """Bring the tensors into the sources, and compute their scales."""
        for layout in self.source:
            for name, array in filled(layout, self.values).items():
                if not name.endswith(SCALES):
                    self.held[layout.rank][name][...] = array
            if self.float8:
                write_scales(layout, self.held[layout.rank])

    def full(self, version: int) -> None:
        self.load()
        for sender in self.ranks.senders.values():
            sender.full(version)
        run_ranks(self.plan, self.held, self.got)
        for rank, receiver in self.ranks.receivers.items():
            receiver.adopt(version, self.ranks.digests(rank))

    def delta(self, version: int) -> tuple[int, int]:
        """Send a delta; return its changed elements and all, after comparing with a dense exchange."""
        self.load()
        sizes = self.ranks.encode(version)
        for rank, receiver in self.ranks.receivers.items():
            self.ranks.receive(rank, self.ranks.messages(rank))
            receiver.commit(version)
        dense = {layout.rank: empty(layout) for layout in self.destination}
        run_ranks(self.plan, self.held, dense)
        for layout in self.destination:
            for name, expected in dense[layout.rank].items():
                np.testing.assert_array_equal(self.got[layout.rank][name].view(np.uint8), expected.view(np.uint8))
        return sum(size.changed for size in sizes), sum(size.elements for size in sizes)


def stepped(values: dict[str, torch.Tensor], size: float, share: float, seed: int) -> None:
    """Move a share of the weights by a relative `size`, in float32, rounded back to their dtype."""
    generator = torch.Generator().manual_seed(seed)
    for name, weights in values.items():
        moved = weights.float() * (1 + size * torch.randn(weights.shape, generator=generator))
        values[name] = torch.where(torch.rand(weights.shape, generator=generator) < share, moved.to(weights.dtype), weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16 served", "float8 served"])
def test_versions_in_a_row(dtype: str, float8: bool) -> None:
    ranks = Quantised(dtype, float8)
    ranks.full(1)
    for version, (size, share) in enumerate([(1e-3, 1.0), (1e-2, 0.01), (1e-2, 0.001), (0.0, 1.0), (0.5, 1.0)], 2):
        stepped(ranks.values, size, share, version)
        changed, elements = ranks.delta(version)
        assert (changed == 0) == (size == 0)
        if share < 1:
            assert changed < 2 * share * elements + 4 * BLOCK**2


def test_a_changed_scale_changes_its_block_and_no_other() -> None:
    """The largest weight of one block grows: nearly all codes of that block are others, and the scale; nothing else is sent."""
    ranks = Quantised("bfloat16", True)
    ranks.values["w.down"][:128, :128] = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ranks.full(1)
    block = ranks.values["w.down"][:128, :128]
    block[5, 7] = 1.37 * block.float().abs().max()
    scales = {rank: arrays["w2" + SCALES].copy() for rank, arrays in ranks.got.items()}
    changed, _ = ranks.delta(2)
    assert 0.5 * BLOCK**2 < changed <= BLOCK**2 + 1
    assert sum(int((ranks.got[rank]["w2" + SCALES] != before).sum()) for rank, before in scales.items()) == 1
