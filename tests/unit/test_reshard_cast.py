"""float32 in the source, bfloat16 in the destination: rounded on the way, next to tensors that keep their dtype, against torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_ranks import Arrays, filled, run_ranks, single
from test_reshard_plan import Case
from test_reshard_program import rounded
from test_reshard_random import cases

from asyncmoe.errors import LayoutError
from asyncmoe.reshard import PADDING, RankLayout, plan
from asyncmoe.reshard.layout import whole
from tests.unit.example_counts import examples

RAW = {"float32": np.uint32, "bfloat16": np.uint16}
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-39, 3.4e38, 1.00390625, 1.01171875], np.float32).view(np.uint32)
"""Zeros, infinities, a NaN, denormals, what rounds to infinity, and two ties: one goes down to even, the other up."""


def bits(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    """Random float32 as uint32, every bit pattern as likely as another, special values among them."""
    random = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes.items():
        flat = random.integers(0, 1 << 32, int(np.prod(shape)), np.uint32)
        special = random.random(flat.size) < 0.3
        flat[special] = random.choice(SPECIAL, int(special.sum()))
        values[name] = flat.reshape(shape)
    return values


def with_dtypes(layout: RankLayout, dtypes: Mapping[str, str]) -> RankLayout:
    return replace(layout, storages={name: replace(s, dtype=dtypes[name]) for name, s in layout.storages.items()})


def contents(layout: RankLayout, values: Arrays) -> Arrays:
    """What the storages must hold, in the dtype of each."""
    exact = filled(with_dtypes(layout, dict.fromkeys(layout.storages, "int32")), values)
    cast = filled(layout, {n: rounded(v.view(np.float32)) for n, v in values.items()}, np.int16)
    return {name: (exact if s.dtype == "float32" else cast)[name].view(RAW[s.dtype]) for name, s in layout.storages.items()}


def empty(layout: RankLayout) -> Arrays:
    return {name: np.full(s.shape, 0xABCD, RAW[s.dtype]) for name, s in layout.storages.items()}


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit; but which NaN a NaN becomes differs within torch itself (its scalar and its vector code)."""
    if got.dtype == np.uint16:
        got, expected = (np.where((a & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), a) for a in (got, expected))
    np.testing.assert_array_equal(got, expected)


@st.composite
def mixed(draw: st.DrawFn) -> Case:
    """Random layouts where every destination storage is float32 or bfloat16 and all sources are float32; or the other way round."""
    shapes, source, destination = draw(cases())
    varied = draw(st.sampled_from(["source", "destination"]))

    def choose(layout: RankLayout, side: str) -> RankLayout:
        fixed = "float32" if side == "source" else "bfloat16"
        return with_dtypes(layout, {n: draw(st.sampled_from(sorted(RAW))) if side == varied else fixed for n in layout.storages})

    return shapes, [choose(one, "source") for one in source], [choose(one, "destination") for one in destination]


@given(mixed(), st.integers(0, 99))
@settings(max_examples=examples(150), deadline=None)
def test_every_destination_element_is_what_torch_rounds_it_to(case: Case, seed: int) -> None:
    shapes, source, destination = case
    values = bits(shapes, seed)
    made = plan(shapes, source, destination)
    if not {layout.rank for layout in source} & {layout.rank for layout in destination}:
        wanted = [(d.storages[p.storage].dtype, p.box.size) for d in destination for p in d.pieces if p.tensor != PADDING]
        assert made.wire_bytes == sum(size * (4 if dtype == "float32" else 2) for dtype, size in wanted)
    got = {layout.rank: empty(layout) for layout in destination}
    run_ranks(made, {layout.rank: contents(layout, values) for layout in source}, got)
    for layout in destination:
        for name, expected in contents(layout, values).items():
            assert_same(got[layout.rank][name], expected)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")],
)
def test_any_other_difference_is_refused(held: str, wanted: str) -> None:
    with pytest.raises(LayoutError) as caught:
        plan({"w": (4, 6)}, [single(3, "s", "w", whole((4, 6)), held)], [single(7, "s", "w", whole((4, 6)), wanted)])
    for part in ("rank 7: tensor w box [0:4, 0:6]", f"got {wanted}, but {held} in rank 3: tensor w box [0:4, 0:6]", "float32"):
        assert part in str(caught.value)
