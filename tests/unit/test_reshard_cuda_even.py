"""Even tiles of the copy kernel, run on the CPU: which way bytes go, and that they arrive the same either way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reshard_cuda_emulated import aligned, both, random
from test_reshard_program import address, casts, message_rows, swapped

import asyncmoe.reshard._C as _C
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import plan
from asyncmoe.reshard.chunks import cut_transfer, cuts_of
from asyncmoe.reshard.programs import message_program, scales_of
from benchmarks.gpu import ways_of
from benchmarks.published import FLOAT8, REAL

TILE = 32768
"""Bytes of an even tile (csrc/copy_even.h)."""
LEAST = 8192
"""Bytes of the smallest even part of a box (csrc/copy_table.cpp)."""


def ways(program: _C.Program, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    """Bytes by way."""
    found: dict[str, int] = {}
    for (way, _), (_, nbytes) in _C.ways_on_cuda(program, 0, address(source), address(target)).items():
        found[way] = found.get(way, 0) + nbytes
    return found


def one_chunk(rows: np.ndarray, message: str, kinds: np.ndarray | None = None) -> _C.Program:
    return _C.Program(rows, np.array([0, len(rows)], np.int64), message, *([] if kinds is None else [kinds]))


def strided(height: int, run: int, gap: int) -> tuple[np.ndarray, int]:
    """Rows of bytes `gap` apart, and the bytes of what they are in."""
    return np.array([[0, 0, 0, 0, 1, 1, 1, height, run, 0, 0, run + gap, 1, 0, 0, run, 1]], np.int64), height * (run + gap)


@pytest.mark.parametrize("nbytes", [LEAST, TILE - 16, TILE, TILE + 16, 3 * TILE + LEAST + 48, 256 * 16 * 3 + 16])
def test_one_run_goes_evenly_packed_and_unpacked(nbytes: int) -> None:
    rows, held = message_rows([(0, (1, 1, 1, nbytes))], 1)
    packing, unpacking = one_chunk(rows, "destination"), one_chunk(swapped(rows), "source")
    source = random(held)
    message = both(packing, source, (nbytes, 0), 2)
    assert ways(packing, source, message) == ways(unpacking, message, source) == {"run": nbytes}
    both(unpacking, message, (held, 0), 3)


@pytest.mark.parametrize("run", [32, 48, 384, 16384, 32752, 32768, 40000, 524288, 524304])
@pytest.mark.parametrize("gap", [16, 1152])
def test_rows_go_evenly_packed_and_unpacked(run: int, gap: int) -> None:
    """Up to the longest run that is divided by multiplication, and one that is cut where it ends."""
    rows, held = strided(max(3, 3 * TILE // run + 1), run, gap)
    packing, unpacking = one_chunk(rows, "destination"), one_chunk(swapped(rows), "source")
    source = random(held)
    message = both(packing, source, (packing.bytes(0), 0), 2)
    for program, ends in ((packing, (source, message)), (unpacking, (message, source))):
        found = ways(program, *ends)
        assert "uneven" not in found
        assert ("rows" in found) == (run <= 524288 and run % TILE != 0)
    both(unpacking, message, (held, 0), 1)


@pytest.mark.parametrize(("run", "gap", "shift"), [(16, 16, 0), (40, 8, 0), (384, 8, 0), (384, 16, 8), (384, 16, 1)])
def test_what_is_not_aligned_is_looked_up(run: int, gap: int, shift: int) -> None:
    """Runs of one unit, rows that are no units, a gap that is none, bases that are no multiples of 16."""
    rows, held = strided(2 * TILE // run, run, gap)
    program, source = one_chunk(rows, "destination"), random(held, shift)
    assert ways(program, source, both(program, source, (program.bytes(0), 0), 1)) == {"uneven": program.bytes(0)}
    rows, held = strided(2 * TILE // 384, 384, 16)
    program, source = one_chunk(rows, "destination"), random(held)
    assert "uneven" not in ways(program, source, both(program, source, (program.bytes(0), 0), 1))
    assert set(ways(program, source, both(program, source, (program.bytes(0), 4), 1))) == {"uneven"}


def rows_of(boxes: list[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
    """Rows that pack boxes of (bytes between runs, runs, bytes of a run), and the bytes they are packed from."""
    rows, at, offset = [], 0, 0
    for gap, height, run in boxes:
        rows.append([0, offset, 0, at, 1, 1, 1, height, run, 0, 0, run + gap, 1, 0, 0, run, 1])
        at, offset = at + height * run, offset + height * (run + gap)
    return np.array(rows, np.int64), offset


boxes_of = st.lists(
    st.one_of(
        st.tuples(st.just(0), st.just(1), st.one_of(st.integers(1, 3000), st.integers(LEAST - 20, 2 * TILE))),
        st.tuples(st.just(0), st.just(1), st.integers(1, 4).map(lambda n: n * TILE // 2)),
        st.tuples(st.sampled_from([16, 32, 5]), st.integers(2, 300), st.integers(1, 20).map(lambda n: 16 * n)),
        st.tuples(st.integers(0, 9), st.integers(1, 30), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=4,
)


@given(boxes=boxes_of, shift=st.sampled_from([0, 0, 0, 8, 2]), blocks=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_messages_of_boxes_of_both_kinds(boxes: list[tuple[int, int, int]], shift: int, blocks: int) -> None:
    """Tiles end wherever boxes and runs do, so that units straddle boxes, and bases are aligned or not."""
    rows, held = rows_of(boxes)
    packing, unpacking = one_chunk(rows, "destination"), one_chunk(swapped(rows), "source")
    source = random(held, shift)
    message = both(packing, source, (packing.bytes(0), 0), blocks)
    both(unpacking, message, (held, shift), blocks)
    assert sum(ways(packing, source, message).values()) == packing.bytes(0)
    back = aligned(held, shift)
    assert sum(ways(unpacking, message, back).values()) == packing.bytes(0)


@given(
    height=st.integers(1, 150), units=st.integers(2, 40), gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    zeros=st.booleans(), blocks=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_copies_without_a_message(height: int, units: int, gaps: tuple[int, int], zeros: bool, blocks: int) -> None:
    """Rows that lie apart on both sides, beside a box of zeros."""
    run, source_step, step = 16 * units, 16 * (units + gaps[0]), 16 * (units + gaps[1])
    box = [0, 0, 0, 0, 1, 1, 1, height, run, 0, 0, source_step, 1, 0, 0, step, 1]
    behind = [-1 if zeros else 0, 0, 0, height * step, 1, 1, 1, 1, LEAST, 0, 0, 0, 1, 0, 0, 0, 1]
    program = one_chunk(np.array([box, behind], np.int64), "none")
    source = random(max(LEAST, height * source_step))
    got = both(program, source, (height * step + LEAST, 0), blocks)
    found = ways(program, source, got)
    evenly = found.get("run", 0) + found.get("rows", 0)
    assert evenly == (height * run if height * run >= LEAST else 0) + (0 if zeros else LEAST)


@given(height=st.integers(1, 40), units=st.integers(1, 200), gap=st.integers(0, 3), blocks=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_float32_is_rounded_evenly(height: int, units: int, gap: int, blocks: int) -> None:
    columns = 8 * units
    row = [0, 0, 0, 0, 4, 1, 1, height, columns, 0, 0, 4 * (columns + 8 * gap), 4, 0, 0, 2 * columns, 2]
    program = one_chunk(np.array([row], np.int64), "destination", casts(1))
    source = random(4 * height * (columns + 8 * gap))
    found = ways(program, source, both(program, source, (program.bytes(0), 0), blocks))
    uneven = program.bytes(0) < LEAST or (units == 1 and gap > 0 and height > 1)
    assert ("uneven" in found) == uneven


@pytest.mark.parametrize("cast", [2, 3])
@pytest.mark.parametrize(
    ("shape", "begin", "columns"), [((300, 1024), 0, 1024), ((300, 1024), 256, 512), ((200, 400), 16, 80), ((64, 8192), 128, 4096)]
)
@pytest.mark.parametrize("message", ["none", "destination"])
def test_quantised_weights_go_evenly(cast: int, shape: tuple[int, int], begin: int, columns: int, message: str) -> None:
    """Rows of a matrix and parts of rows, with a scale of its own for every block, as it is without even tiles."""
    (height, width), item = shape, 4 if cast == 2 else 2
    generator = np.random.default_rng(0)
    values = generator.standard_normal(height * width).astype(np.float32) * 100
    source = aligned(height * width * item, 0)
    source[:] = (values if item == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    across = -(-width // 128)
    scales = (2.0 ** generator.integers(-3, 4, -(-height // 128) * across)).astype(np.float32)
    row = [0, begin * item, 0, 0, item, 1, 1, height, columns, 0, 0, width * item, item, 0, 0, columns, 1]
    program = one_chunk(np.array([row], np.int64), message, casts(cast, scales=1, width=width))
    bases = np.array([source.ctypes.data, scales.ctypes.data], np.int64)
    got, expected, uneven = (aligned(height * columns, shift) for shift in (0, 0, 8))
    program.run(0, bases, address(expected), 1)
    for target in (got, uneven):
        _C.emulate_cuda(program, 0, bases, address(target), 2)
        np.testing.assert_array_equal(target, expected)
    assert {way for way, _ in _C.ways_on_cuda(program, 0, bases, address(got))} <= {"run", "rows"}
    assert set(_C.ways_on_cuda(program, 0, bases, address(uneven))) == {("uneven", 0)}


def test_offsets_of_more_than_4_gib() -> None:
    """Rows that are 3 GiB apart are none of an even tile; a box 5 GiB into its array is. Memory that is not touched costs nothing."""
    far = np.empty(7 << 30, np.uint8)
    start = -far.ctypes.data % 16
    far = far[start : (7 << 30) - 16 + start]
    near = [0, 5 << 30, 0, 0, 1, 1, 1, 64, 1024, 0, 0, 4096, 1, 0, 0, 1024, 1]
    wide = [0, 0, 0, 64 * 1024, 1, 1, 1, 2, LEAST, 0, 0, 3 << 30, 1, 0, 0, LEAST, 1]
    program = one_chunk(np.array([near, wide], np.int64), "destination")
    for start in (5 << 30, 0, 3 << 30):
        far[start : start + 64 * 4096] = np.random.default_rng(start).integers(0, 256, 64 * 4096, np.uint8)
    message = both(program, far, (program.bytes(0), 0), 1)
    assert ways(program, far, message) == {"rows": 64 * 1024, "uneven": 2 * LEAST}
    assert not np.array_equal(message[: 4 * 1024], message[-4 * 1024 :])


# ---------------------------------------------------------------- real plans

GRIDS = MegatronParallel(tp=4, ep=8, dp=2), EngineParallel(tp=4)


@pytest.mark.parametrize(
    ("model", "dtype", "float8", "layers"),
    [("Qwen3-30B-A3B", "bfloat16", False, 4), ("Qwen3-30B-A3B", "float32", False, 4), ("DeepSeek-V3", "bfloat16", True, 5)],
)
def test_nearly_all_bytes_of_published_models_go_evenly(model: str, dtype: str, float8: bool, layers: int) -> None:
    extra = {"num_hidden_layers": layers, "num_nextn_predict_layers": 0} | ({"quantization_config": FLOAT8} if float8 else {})
    payload, (trainer, engine) = Payload({**REAL[model], **extra}), GRIDS
    source = payload.trainer(trainer, dtype)
    destination = payload.engines(engine, "bfloat16", 1, first=trainer.world)
    made = plan(payload.tensors(), source, destination, ranks=[0, trainer.world])
    cuts = cuts_of(made, 64 << 20)
    for packing, rank in ((True, 0), (False, trainer.world)):
        lanes = [
            cut_transfer(made, t, *cuts[t.source, t.destination])
            for t in made.transfers
            if t.source != t.destination and rank == (t.source if packing else t.destination)
        ]
        scales = [scales_of(made.sources[rank], [lane.copies for lane in lanes])] if packing else []
        found = ways_of([message_program(lane, "destination" if packing else "source", *scales) for lane in lanes])
        total = sum(found.values())
        assert found.get("run", 0) / total > 0.6
        assert found.get("uneven", 0) / total < 0.001
