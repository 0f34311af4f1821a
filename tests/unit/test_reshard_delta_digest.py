"""The canonical digest of a shard, against its definition in plain Python; and memory of devices that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from delta_ranks import oracle_digest, oracle_term
from test_reshard_delta import RAW, large, matrix
from test_reshard_random import Shapes

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError, UserError
from asyncmoe.reshard import Box, LayoutBuilder, shard_digest
from asyncmoe.reshard.delta_digest import seed_of


def test_terms_are_those_of_the_definition() -> None:
    """Numbers that nobody may change: senders and receivers of different releases compare them."""
    assert seed_of("model.layers.0.mlp.gate") == 0xE75593D2974DC7FD
    array = np.array([[1, 2, 3], [4, 5, 65535]], np.uint16)
    expected = sum(oracle_term("w", i, int(v)) for i, v in enumerate(array.reshape(-1))) % (1 << 64)
    assert shard_digest({"w": (2, 3)}, matrix(0, (2, 3)), {"s": array}) == expected


def test_every_single_bit_shows() -> None:
    """In tensors of every item and in padding."""
    builder = LayoutBuilder(0, "bfloat16")
    shapes: Shapes = {"a": (5, 3), "b": (4,), "c": (3,), "d": (2, 2)}
    builder.place("a", (7, 3), [("a", Box((0, 0), (5, 3)), (1, 0)), *((("<padding>", Box((0, 0), (1, 3)), (i, 0))) for i in (0, 6))])
    for name, dtype in (("b", "float32"), ("c", "float64"), ("d", "uint8")):
        builder.place(name, shapes[name], [(name, Box((0,) * len(shapes[name]), shapes[name]), (0,) * len(shapes[name]))], dtype)
    layout = builder.build()
    generator = np.random.default_rng(3)
    items = {"a": 2, "b": 4, "c": 8, "d": 1}
    arrays = {n: generator.integers(0, 256, (*s.shape[:-1], s.shape[-1] * items[n]), np.uint8) for n, s in layout.storages.items()}
    seen = {shard_digest(shapes, layout, arrays)}
    assert seen == {oracle_digest(shapes, layout, {n: a.view(RAW[items[n]]) for n, a in arrays.items()})}
    bits = 0
    for array in arrays.values():
        for byte in np.ndindex(*array.shape):
            for bit in range(8):
                array[byte] ^= 1 << bit
                seen.add(shard_digest(shapes, layout, arrays))
                array[byte] ^= 1 << bit
                bits += 1
    assert len(seen) == bits + 1


def test_the_digest_of_a_tensor_does_not_depend_on_cuts_or_order() -> None:
    shape = (300, 40)
    values = np.random.default_rng(4).integers(0, 1 << 16, shape, np.uint16)
    total = shard_digest({"w": shape}, matrix(0, shape), {"s": values})
    parts = 0
    for at in range(0, 300, 60):
        builder = LayoutBuilder(0, "bfloat16")
        builder.place("part", (60, 40), [("w", Box((at, 0), (60, 40)), (0, 0))])
        parts += shard_digest({"w": shape}, builder.build(), {"part": values[at : at + 60].copy()})
    assert parts % (1 << 64) == total


class _OnDevice:
    """An array as DLPack shows one that lies on a GPU."""

    def __init__(self, shape: tuple[int, ...], address: int = 1 << 12) -> None:
        import torch

        self.layout, self.shape, self.device, self.address = torch.strided, shape, torch.device("cuda", 0), address
        self.dtype = torch.bfloat16

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.address

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self.numel() * self.element_size())

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def element_size(self) -> int:
        return 2

    def __dlpack__(self) -> None:
        raise AssertionError


def test_memory_of_a_device_that_is_not_there_is_refused() -> None:
    """And shard_digest reads host memory only."""
    ranks, shapes, wanted = large("bfloat16", 2)
    halves = {f"half{i}": _OnDevice((700, 500), (i + 1) << 30) for i in range(2)}
    error, said = (UserError, "GPU 0: got 0 visible devices") if _C.CUDA else (LayoutError, "arrays of a delta: got cuda:0, expected host")
    for bind in (lambda: ranks.senders[0].bind({"s": _OnDevice((700, 1000))}), lambda: ranks.receivers[1].bind(halves)):
        if _C.cuda_device_count() == 0:
            with pytest.raises(error, match=said):
                bind()
    with pytest.raises(LayoutError, match="arrays to digest: got cuda:0, expected host memory"):
        shard_digest(shapes, wanted, halves)
    with pytest.raises(LayoutError, match="destination arrays of a delta: got cpu and cuda:0, expected all on one device"):
        ranks.receivers[1].bind({**halves, "half1": ranks.destinations[1]["half1"]})
