"""Weights that become float8 with a scale for every block on the way: against torch's float8, SGLang's own quantisation, and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reshard_ranks import Arrays, inside, run_ranks, single, view
from test_reshard_copy import address
from test_reshard_program import casts

import asyncmoe.reshard._C as _C
from asyncmoe.errors import LayoutError
from asyncmoe.reshard import LayoutBuilder, RankLayout, plan
from asyncmoe.reshard.float8 import BLOCK, FLOAT8, SCALES, scales_shape, with_scale_tensors, with_scales, write_scales
from asyncmoe.reshard.layout import columns, rows, whole
from tests import float8

RAW = {"float32": np.float32, "bfloat16": np.uint16, FLOAT8: np.uint8}
Shapes = dict[str, tuple[int, ...]]


def chosen(name: str) -> bool:
    return name.startswith("w")


def quantise(weights: torch.Tensor, *, power_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """SGLang's float8 bytes and scales of a matrix."""
    made, scales = float8.quantise(weights, power_of_two=power_of_two)
    return made.view(torch.uint8).numpy(), scales.numpy()


def random(shape: tuple[int, ...], seed: int, dtype: str) -> torch.Tensor:
    """Weights of very different sizes: some blocks are tiny, some zero, some hold one that is far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 0.02
    grown = 10.0 ** torch.randint(-8, 4, scales_shape(shape), generator=generator)
    grown[torch.rand(grown.shape, generator=generator) < 0.1] = 0
    values *= grown.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]
    values[torch.rand(shape, generator=generator) < 1e-4] *= 1000
    return values.to(getattr(torch, dtype))


def raw(values: torch.Tensor) -> np.ndarray:
    return values.numpy() if values.dtype == torch.float32 else values.view(torch.int16).numpy().view(np.uint16)


def filled(layout: RankLayout, values: dict[str, torch.Tensor]) -> Arrays:
    """A source's storages of matrices, with room for their scales."""
    held = {name: np.zeros(s.shape, RAW[s.dtype]) for name, s in layout.storages.items()}
    for piece in layout.pieces:
        if not piece.tensor.endswith(SCALES):
            view(held[piece.storage], piece)[...] = raw(inside(values[piece.tensor], piece.box))
    return held


def empty(layout: RankLayout) -> Arrays:
    return {name: np.full(s.shape, 77, RAW[s.dtype]) for name, s in layout.storages.items()}


def sent(
    shapes: Shapes,
    source: list[RankLayout],
    destination: list[RankLayout],
    values: dict[str, torch.Tensor],
    power_of_two: bool = False,
    **how: int,
) -> list[Arrays]:
    """What every destination rank has after an exchange."""
    sources = [with_scales(layout, shapes, chosen, quantised=False) for layout in source]
    wanted = [with_scales(layout, shapes, chosen, quantised=True) for layout in destination]
    held = {layout.rank: filled(layout, values) for layout in sources}
    for layout in sources:
        write_scales(layout, held[layout.rank], power_of_two=power_of_two)
    got = {layout.rank: empty(layout) for layout in wanted}
    run_ranks(plan(with_scale_tensors(shapes, chosen), sources, wanted), held, got, **how)
    return [got[layout.rank] for layout in wanted]


def one(rank: int, dtype: str, shape: tuple[int, ...]) -> RankLayout:
    return single(rank, "weight", "w", whole(shape), dtype)


# ---------------------------------------------------------------- elements


def row_of(source: np.ndarray, destination: int) -> np.ndarray:
    item = source.itemsize
    return np.array([[0, 0, 0, 0, item, 1, 1, 1, source.size, 0, 0, 0, item, 0, 0, 0, destination]], np.int64)


@pytest.mark.parametrize("how", ["cpu", "gpu emulated"])
def test_every_kind_of_number_becomes_torchs_float8(how: str) -> None:
    """All bfloat16 there are, float32 around all ties between two float8, denormals, what is too large, infinities and NaNs."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    ties = ((codes[1:] + codes[:-1]) / 2).float().numpy()
    around = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (0, 1e9)] + [ties, -ties])
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    floats = np.concatenate([around, bits, np.array([448, 463.99, 464, 464.01, 480, -480, 1e-45, 2**-10], np.float32)])
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for cast, values in ((2, torch.from_numpy(floats)), (3, halves)):
        source, got = np.ascontiguousarray(raw(values)), np.zeros(len(values), np.uint8)
        scales = np.ones(-(-len(values) // BLOCK), np.float32)
        bases = np.array([source.ctypes.data, scales.ctypes.data], np.int64)
        kind = casts(cast, scales=1, width=len(values))
        if how == "cpu":
            _C.copy(row_of(source, 1), bases, address(got), 2, kind)
        else:
            _C.emulate_cuda(_C.Program(row_of(source, 1), np.array([0, 1], np.int64), "none", kind), 0, bases, address(got), 3)
        expected = values.float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        number = ~np.isnan(values.float().numpy())
        np.testing.assert_array_equal(got[number], expected[number])
        assert ((got[~number] & 0x7F) == 0x7F).all()


# ---------------------------------------------------------------- matrices


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (192, 100), (1, 1), (300, 1000), (576, 256)])
def test_bytes_and_scales_are_sglangs_own(shape: tuple[int, int], dtype: str, power_of_two: bool) -> None:
    weights = random(shape, 1, dtype)
    (got,) = sent({"w": shape}, [one(0, dtype, shape)], [one(1, "bfloat16", shape)], {"w": weights}, power_of_two=power_of_two)
    expected, scales = quantise(weights, power_of_two=power_of_two)
    np.testing.assert_array_equal(got["weight" + SCALES], scales)
    np.testing.assert_array_equal(got["weight"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [0, 4])
def test_the_gpus_scales_are_the_cpus(dtype: str, shift: int) -> None:
    """Of rows that are read 16 bytes at a time, and of those that cannot be: by their width, or where they begin."""
    shapes = {"a": (300, 1000), "b": (1, 1), "c": (128, 129), "d": (0, 5), "e": (256, 256), "f": (130, 136)}
    table, kept, both = [], [], []
    for number, shape in enumerate(shapes.values()):
        plain = raw(random(shape, number, dtype))
        room = np.zeros(plain.nbytes + 32, np.uint8)
        start = -room.ctypes.data % 16 + shift
        values = room[start : start + plain.nbytes].view(plain.dtype).reshape(shape)
        values[...] = plain
        made = [np.zeros(scales_shape(shape), np.float32) for _ in range(2)]
        kept.append(values)
        both.append(made)
        table.append([values.ctypes.data, values.itemsize, *shape])
    for which, run in enumerate((lambda rows: _C.scale_blocks(rows, False, 2), lambda rows: _C.emulate_scale_blocks(rows, False))):
        run(np.array([[*row, made[which].ctypes.data] for row, made in zip(table, both, strict=True)], np.int64))
    for cpu, gpu in both:
        np.testing.assert_array_equal(cpu, gpu)


def test_a_nan_is_not_lost() -> None:
    weights = torch.randn(256, 256)
    weights[3, 200] = float("nan")
    (got,) = sent({"w": (256, 256)}, [one(0, "float32", (256, 256))], [one(1, "bfloat16", (256, 256))], {"w": weights})
    np.testing.assert_array_equal(np.isnan(got["weight" + SCALES]), [[False, True], [False, False]])
    assert ((got["weight"][:128, 128:] & 0x7F) == 0x7F).all()


# ---------------------------------------------------------------- shards


SHAPES: Shapes = {"w.gate": (512, 256), "w.up": (512, 256), "w.down": (256, 512), "norm": (256,)}


def shards(dtype: str) -> tuple[list[RankLayout], list[RankLayout]]:
    """Sharded by rows in the source, fused, stacked and sharded by columns in the destination, next to a tensor that is not quantised."""
    source, destination = [], []
    for r in range(2):
        builder = LayoutBuilder(r, dtype)
        builder.stack("fc1", [(f"w.{part}", rows((512, 256), 256 * r, 256)) for part in ("gate", "up")])
        builder.stack("fc2", [("w.down", columns((256, 512), 256 * r, 256))])
        builder.place("norm", (256,), [("norm", whole((256,)), (0,))])
        source.append(builder.build())
    for r in range(4):
        builder = LayoutBuilder(10 + r, "bfloat16")
        parts = [(f"w.{part}", rows((512, 256), 128 * r, 128), (1, 128 * i, 0)) for i, part in enumerate(("gate", "up"))]
        builder.place("w13", (2, 256, 256), [*parts, *((name, box, (0, *corner[1:])) for name, box, corner in parts)])
        builder.place("w2", (1, 256, 128), [("w.down", columns((256, 512), 128 * r, 128), (0, 0, 0))])
        builder.place("norm", (256,), [("norm", whole((256,)), (0,))])
        destination.append(builder.build())
    return source, destination


def test_shards_of_many_ranks() -> None:
    values = {name: random((*shape, 1)[:2], 7, "bfloat16").reshape(shape) for name, shape in SHAPES.items()}
    for r, got in enumerate(sent(SHAPES, *shards("bfloat16"), values)):
        (gate, of_gate), (up, of_up), (down, of_down) = (quantise(values[f"w.{part}"]) for part in ("gate", "up", "down"))
        w13, scales = np.concatenate([m[128 * r :][:128] for m in (gate, up)]), np.concatenate([m[r : r + 1] for m in (of_gate, of_up)])
        np.testing.assert_array_equal(got["w13"], np.stack([w13, w13]))
        np.testing.assert_array_equal(got["w13" + SCALES], np.stack([scales, scales]))
        np.testing.assert_array_equal(got["w2"], down[None, :, 128 * r :][:, :, :128])
        np.testing.assert_array_equal(got["w2" + SCALES], of_down[None, :, r : r + 1])
        np.testing.assert_array_equal(got["norm"], raw(values["norm"].to(torch.bfloat16)))


@pytest.mark.parametrize("bucket", [2_000, 10_000, 1 << 20])
def test_messages_are_cut_anywhere(bucket: int) -> None:
    """A scale belongs to its block wherever a message ends."""
    shape, weights = (300, 400), random((300, 400), 3, "bfloat16")
    sides = [[one(rank, "bfloat16", shape)] for rank in range(2)]
    (got,) = sent({"w": shape}, *sides, {"w": weights}, bucket_bytes=bucket)
    np.testing.assert_array_equal(got["weight"], quantise(weights)[0])


# ---------------------------------------------------------------- what cannot be


def test_blocks_that_are_cut_are_refused() -> None:
    shapes: Shapes = {"w": (256, 256), "x": (256, 256), "w.short": (100, 256), "w.vector": (5,)}

    def refused(parts: list[tuple[str, Any]], *words: str) -> None:
        builder = LayoutBuilder(3, "bfloat16")
        builder.stack("fused", parts)
        with pytest.raises(LayoutError) as caught:
            with_scales(builder.build(), shapes, chosen, quantised=False)
        assert all(word in str(caught.value) for word in ("rank 3", *words)), caught.value

    refused([("w", rows((256, 256), 64, 128))], "w box [64:192, 0:256] in storage fused", "blocks of 128 x 128")
    refused([("w", columns((256, 256), 0, 64))], "w box [0:256, 0:64]")
    refused([("w.short", whole((100, 256))), ("w", whole((256, 256)))], "w.short box [0:100, 0:256]")
    refused([("w", whole((256, 256))), ("x", whole((256, 256)))], "x in it", "only quantised tensors")
    with pytest.raises(LayoutError, match=r"tensor w.vector: got shape \(5,\), expected a matrix"):
        with_scale_tensors(shapes, chosen)


def test_missing_scales_are_named() -> None:
    shape = (128, 128)
    source = with_scales(one(0, "bfloat16", shape), {"w": shape}, chosen, quantised=False)
    wanted = with_scales(one(0, "bfloat16", shape), {"w": shape}, chosen, quantised=True)
    held = filled(source, {"w": random(shape, 0, "bfloat16")})
    del held["weight" + SCALES]
    tensors = with_scale_tensors({"w": shape}, chosen)
    for use in (lambda: write_scales(source, held), lambda: run_ranks(plan(tensors, [source], [wanted]), {0: held}, {0: empty(wanted)})):
        with pytest.raises(LayoutError, match="weight_scale_inv: got nothing"):
            use()
