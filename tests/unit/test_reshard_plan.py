"""Parts of plans, and how replicated sources share: over random layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_ranks import single
from test_reshard_random import Shapes, cases

from asyncmoe.errors import LayoutError
from asyncmoe.reshard import PADDING, Box, LayoutBuilder, Plan, RankLayout, plan
from asyncmoe.reshard.layout import columns, rows, whole
from asyncmoe.reshard.plan import DESTINATION, NO_SOURCE, SOURCE
from asyncmoe.reshard.table import enumerate_tensors, tabulate
from tests.unit.example_counts import examples

Case = tuple[Shapes, list[RankLayout], list[RankLayout]]


def check_part(full: Plan, part: Plan, rank: int) -> None:
    """A rank's part has exactly its transfers of the whole plan, and its own storages are numbered as there."""
    mine = [t for t in full.transfers if rank in (t.source, t.destination)]
    assert [(t.source, t.destination, t.nbytes) for t in part.transfers] == [(t.source, t.destination, t.nbytes) for t in mine]
    for ours, theirs in zip(part.transfers, mine, strict=True):
        same = ours.copies == theirs.copies
        same[:, SOURCE] |= ours.source != rank
        same[:, DESTINATION] |= ours.destination != rank
        assert same.all()
    for side, whole_side in ((part.sources, full.sources), (part.destinations, full.destinations)):
        assert side.get(rank) == whole_side.get(rank)
        assert list(side.get(rank, ())) == list(whole_side.get(rank, ()))


@given(cases())
@settings(max_examples=examples(60), deadline=None)
def test_every_rank_plans_its_own_part(case: Case) -> None:
    shapes, source, destination = case
    full = plan(shapes, source, destination)
    assert full.match.traffic().tolist() == [[t.source, t.destination, t.nbytes] for t in full.transfers if t.nbytes]
    for rank in sorted({layout.rank for layout in (*source, *destination)}):
        part = plan(shapes, reversed(source), destination, ranks=[rank])  # the order of the layouts does not matter
        check_part(full, part, rank)
        assert part.digest == full.digest


# ---------------------------------------------------------------- sharing

ROWS, COLUMNS = 1 << 12, 1 << 10


@st.composite
def replicated(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]]]:
    """Which of some equally large tensors each source rank holds, and which each destination wants; all are held somewhere."""
    names = [f"t{i}" for i in range(draw(st.integers(1, 6)))]
    count = draw(st.integers(1, 6))
    held: list[list[str]] = [[] for _ in range(count)]
    for name in names:
        for rank in draw(st.sets(st.integers(0, count - 1), min_size=1)):
            held[rank].append(name)
    return held, draw(st.lists(st.lists(st.sampled_from(names), min_size=1, unique=True), min_size=1, max_size=4))


def of_tensors(rank: int, names: list[str]) -> RankLayout:
    builder = LayoutBuilder(rank, "bfloat16")
    for name in names:
        builder.stack(name, [(name, whole((ROWS, COLUMNS)))])
    return builder.build()


@given(replicated(), st.integers(0, 6))
@settings(max_examples=examples(150), deadline=None)
def test_the_busiest_source_is_within_five_percent_of_the_least_possible(case: tuple[list[list[str]], list[list[str]]], first: int) -> None:
    """The least possible is, over all sets of sources, what only they can send, divided by their number."""
    held, wanted = case
    nbytes = 2 * ROWS * COLUMNS
    demands = []
    for i, names in enumerate(wanted):
        local = held[first + i] if first + i < len(held) else []
        demands += [{r for r, mine in enumerate(held) if name in mine} for name in names if name not in local]
    least = 0.0
    for size in range(1, len(held) + 1):
        for chosen in itertools.combinations(range(len(held)), size):
            least = max(least, nbytes * sum(holders <= set(chosen) for holders in demands) / size)
    shapes = {name: (ROWS, COLUMNS) for names in held for name in names}
    source = [of_tensors(rank, names) for rank, names in enumerate(held)]
    made = plan(shapes, source, [of_tensors(first + i, names) for i, names in enumerate(wanted)])
    assert made.wire_bytes == nbytes * len(demands)
    assert max([0, *made.egress.values()]) <= 1.05 * least


def test_sharing_settles_along_a_chain() -> None:
    """Each tensor is held by two neighbours: whoever shares it has to look at what all the others do."""
    ranks = 9
    shapes: Shapes = {f"t{i}": (ROWS, COLUMNS) for i in range(ranks - 1)}
    source = [of_tensors(rank, [f"t{i}" for i in (rank - 1, rank) if 0 <= i < ranks - 1]) for rank in range(ranks)]
    made = plan(shapes, source, [of_tensors(ranks, [*shapes])])
    assert max(made.egress.values()) <= 1.05 * made.wire_bytes / ranks


# ---------------------------------------------------------------- repeated blocks


def layers(rank: int, count: int, dtype: str = "int32") -> tuple[RankLayout, RankLayout]:
    """The same layout made of repeated blocks, and spelled out."""
    part = LayoutBuilder(rank, dtype)
    part.stack("w", [("q", rows((4, 6), 0, 2)), ("k", rows((4, 6), 2, 2)), (PADDING, whole((1, 6)))])
    short, long = LayoutBuilder(rank, dtype), LayoutBuilder(rank, dtype)
    for builder in (short, long):
        builder.stack("first", [("embed", whole((3,)))])
    short.repeat(part.build(), [(f"l{i}.", f"m{i + 5}.") for i in range(count)])
    for i in range(count):
        long.stack(f"m{i + 5}.w", [(f"l{i}.q", rows((4, 6), 0, 2)), (f"l{i}.k", rows((4, 6), 2, 2)), (PADDING, whole((1, 6)))])
    for builder in (short, long):
        builder.stack("last", [("embed", whole((3,)))])
    return short.build(), long.build()


LAYERS: Shapes = {"embed": (3,)} | {f"l{i}.{name}": (4, 6) for i in range(3) for name in "qk"}


def test_blocks_are_what_they_spell() -> None:
    short, long = layers(0, 3)
    assert list(short.storages.items()) == list(long.storages.items())
    assert tuple(short.pieces) == tuple(long.pieces)
    assert short == long
    assert short != layers(0, 2)[0]
    source = LayoutBuilder(1, "int32")
    for name, shape in LAYERS.items():
        source.stack(name, [(name, whole(shape))])
    one, other = (plan(LAYERS, [source.build()], [layout]) for layout in (short, long))
    assert one.digest == other.digest
    for a, b in zip(one.transfers, other.transfers, strict=True):
        np.testing.assert_array_equal(a.copies, b.copies)
    assert any((t.copies[:, SOURCE] == NO_SOURCE).sum() == 3 for t in one.transfers)


def test_equal_layouts_are_read_once() -> None:
    short, long = layers(0, 3)
    side = tabulate(enumerate_tensors(LAYERS), [short, short.at(4), long.at(2), layers(5, 2)[0]])
    assert side.ranks.tolist() == [0, 2, 4, 5]
    assert side.table_of.tolist() == [0, 0, 0, 1]
    other = replace(long, storages={**long.storages, "unused": long.storages["first"]})
    assert len(tabulate(enumerate_tensors(LAYERS), [short, other.at(1)]).tables) == 2
    assert len(tabulate(enumerate_tensors(LAYERS), [short, layers(1, 3, "float32")[0]]).tables) == 2


def test_faults_in_blocks_are_named() -> None:
    short, _ = layers(0, 3)
    with pytest.raises(LayoutError, match="unknown tensor"):
        plan({name: shape for name, shape in LAYERS.items() if name != "l2.k"}, [], [short])
    with pytest.raises(LayoutError, match=r"tensor l2.k .*no source for .2:3, 0:1. of l2.k"):
        plan(LAYERS, [layers(1, 2)[0], of_rows(2)], [short])
    builder = LayoutBuilder(0, "int32")
    with pytest.raises(LayoutError, match="prefixes"):
        builder.repeat(short, [("l0.", "m."), ("l1.", "m.")])
    builder.stack("m.first", [("embed", whole((3,)))])
    builder.repeat(short, [("", "m.")])
    with pytest.raises(LayoutError, match="one name for two"):
        plan(LAYERS, [], [builder.build()])


def of_rows(rank: int) -> RankLayout:
    builder = LayoutBuilder(rank, "int32")
    builder.stack("s", [("l2.q", rows((4, 6), 0, 2)), ("l2.k", rows((4, 6), 0, 2))])
    return builder.build()


def test_sources_cut_across_each_other() -> None:
    """Rows on one rank, columns on another, the whole on a third: every holder of a cell may send it."""
    shape = (1 << 10, 1 << 10)
    parts = {0: rows(shape, 0, 512), 1: columns(shape, 256, 512), 2: whole(shape)}
    source = [single(rank, "s", "t", box, "bfloat16") for rank, box in parts.items()]
    made = plan({"t": shape}, source, [single(3, "s", "t", whole(shape), "bfloat16")])
    assert made.wire_bytes == 2 << 20
    assert max(made.egress.values()) <= 1.05 * (2 << 20) / 3


def test_boxes_that_overlap_in_too_many_ways_are_refused() -> None:
    count = 70
    builder = LayoutBuilder(0, "int32")
    for i in range(count):
        builder.stack(f"s{i}", [("t", Box((i, i, i, i), (200, 200, 200, 200)))])
    with pytest.raises(LayoutError, match="too many ways"):
        plan({"t": (300, 300, 300, 300)}, [builder.build()], [])
