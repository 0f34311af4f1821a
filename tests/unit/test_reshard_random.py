"""Random layouts: planned and executed copies against plain NumPy slicing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_ranks import blank, filled, inside, numbered, run_ranks

from asyncmoe.reshard import PADDING, Box, LayoutBuilder, RankLayout, plan
from asyncmoe.reshard.layout import Piece, Storage, contiguous_strides
from tests.unit.example_counts import examples

Shapes = dict[str, tuple[int, ...]]


def split(draw: st.DrawFn, box: Box, depth: int = 2) -> list[Box]:
    """Cut a box at random places, up to 2**depth parts."""
    axes = [k for k, n in enumerate(box.extent) if n > 1]
    if depth == 0 or not axes or draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.extent[axis] - 1))
    low = Box(box.start, tuple(at if k == axis else n for k, n in enumerate(box.extent)))
    high = Box(
        tuple(s + at if k == axis else s for k, s in enumerate(box.start)),
        tuple(n - at if k == axis else n for k, n in enumerate(box.extent)),
    )
    return split(draw, low, depth - 1) + split(draw, high, depth - 1)


@st.composite
def tensors(draw: st.DrawFn, largest: int = 6) -> Shapes:
    shapes = st.lists(st.integers(1, largest), min_size=0, max_size=3).map(tuple)
    return {f"t{i}": shape for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=4)))}


def place(draw: st.DrawFn, rank: int, boxes: list[tuple[str, Box]], padding: bool) -> RankLayout:
    """Put boxes into storages of a rank in one of several forms: own storage, flat together, transposed, padded."""
    builder = LayoutBuilder(rank, "int32")
    storages: dict[str, Storage] = {}
    pieces: list[Piece] = []
    flat: list[tuple[str, Box]] = []
    for i, (tensor, box) in enumerate(boxes):
        form = draw(st.sampled_from(["own", "flat", "transposed", "padded" if padding else "own"]))
        name = f"s{i}"
        if form == "flat":
            flat.append((tensor, box))
        elif form == "transposed" and len(box.extent) >= 2:
            order = draw(st.permutations(range(len(box.extent))))
            shape = tuple(box.extent[k] for k in order)
            steps = contiguous_strides(shape)
            strides = tuple(steps[order.index(k)] for k in range(len(order)))
            storages[name] = Storage(shape, "int32")
            pieces.append(Piece(tensor, box, name, 0, strides))
        elif form == "padded" and box.extent:
            front = draw(st.integers(0, 2))
            shape = (front + box.extent[0] + 1, *box.extent[1:])
            zero = (0,) * len(box.extent)
            parts = [(tensor, box, (front, *zero[1:])), (PADDING, Box(zero, (1, *box.extent[1:])), (shape[0] - 1, *zero[1:]))]
            if front:
                parts.append((PADDING, Box(zero, (front, *box.extent[1:])), zero))
            builder.place(name, shape, parts)
        else:
            builder.place(name, box.extent, [(tensor, box, (0,) * len(box.extent))])
    offset = 0
    for tensor, box in flat:
        pieces.append(Piece(tensor, box, "flat", offset, contiguous_strides(box.extent)))
        offset += box.size
    if flat:
        storages["flat"] = Storage((offset,), "int32")
    built = builder.build()
    return RankLayout(rank, {**built.storages, **storages}, (*built.pieces, *pieces))


@st.composite
def cases(draw: st.DrawFn, largest: int = 6) -> tuple[Shapes, list[RankLayout], list[RankLayout]]:
    shapes = draw(tensors(largest))
    ranks = draw(st.integers(1, 4))
    held: dict[int, list[tuple[str, Box]]] = {r: [] for r in range(ranks)}
    for _ in range(draw(st.integers(1, 3))):  # each round holds everything once more, cut differently: replicas and partial overlaps
        for name, shape in shapes.items():
            for box in split(draw, Box((0,) * len(shape), shape)):
                held[draw(st.integers(0, ranks - 1))].append((name, box))
    first = draw(st.integers(0, ranks))  # destinations may share ranks with sources, or not
    wanted: dict[int, list[tuple[str, Box]]] = {first + r: [] for r in range(draw(st.integers(1, 3)))}
    for rank in wanted:
        for name, shape in shapes.items():
            whole = split(draw, Box((0,) * len(shape), shape))
            wanted[rank] += [(name, box) for box in whole if draw(st.integers(0, 3))]
    source = [place(draw, rank, boxes, False) for rank, boxes in held.items()]
    destination = [place(draw, rank, boxes, True) for rank, boxes in wanted.items()]
    return shapes, source, destination


@given(cases())
@settings(max_examples=examples(150), deadline=None)
def test_every_destination_element_gets_its_value(case: tuple[Shapes, list[RankLayout], list[RankLayout]]) -> None:
    shapes, source, destination = case
    values = numbered(shapes)
    sources = {layout.rank: filled(layout, values) for layout in source}
    got = {layout.rank: blank(layout) for layout in destination}
    run_ranks(lambda rank: plan(shapes, source, destination, ranks=[rank]), sources, got)
    for layout in destination:
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[layout.rank][name], expected)


@given(cases())
@settings(max_examples=examples(100), deadline=None)
def test_each_destination_byte_is_written_once_and_travels_at_most_once(case: tuple[Shapes, list[RankLayout], list[RankLayout]]) -> None:
    shapes, source, destination = case
    made = plan(shapes, source, destination)
    written = {(t.destination, c): 0 for t in made.transfers for c in t.copies[:, 2].tolist()}
    for transfer in made.transfers:
        assert (transfer.copies[:, 6:10] > 0).all()
        for copy in transfer.copies:
            written[transfer.destination, int(copy[2])] += int(copy[5] * copy[6:10].prod())
    for (rank, position), nbytes in written.items():
        assert nbytes == list(made.destinations[rank].values())[position].nbytes
    held = {layout.rank: {p.tensor: [] for p in layout.pieces} for layout in source}
    for layout in source:
        for piece in layout.pieces:
            held[layout.rank][piece.tensor].append(piece.box)
    for transfer in made.transfers:
        assert (transfer.nbytes == 0) == (transfer.source == transfer.destination)
    remote = 0
    for layout in destination:
        for piece in layout.pieces:
            if piece.tensor != PADDING:
                mask = np.ones(shapes[piece.tensor], bool)
                for box in held.get(layout.rank, {}).get(piece.tensor, []):
                    inside(mask, box)[...] = False
                remote += 4 * int(inside(mask, piece.box).sum())
    assert made.wire_bytes == remote
